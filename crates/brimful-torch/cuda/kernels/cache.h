// Disk cache of compiled kernels, so that each is compiled once per machine.
#pragma once

#include <optional>
#include <string>

namespace brimful::kernels {

// Returns 32 hexadecimal digits: a hash of everything a compiled kernel depends on.
std::string cache_key(const std::string& all);

// Returns whether the file exists and only this user may write to it; it may be damaged.
bool is_cached(const std::string& key);

// Reads a cached kernel. Returns none if the file is missing, damaged or foreign, or if others may write to it or
// to its folder.
std::optional<std::string> read_cache(const std::string& key);

// Writes a kernel to the cache. Does nothing if the folder is not writable, or if others may write to it: the
// kernel is then compiled again next time.
void write_cache(const std::string& key, const std::string& cubin) noexcept;

}  // namespace brimful::kernels
