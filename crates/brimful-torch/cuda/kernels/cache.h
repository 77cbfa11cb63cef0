// Compiled kernels on disk, so that each is compiled once a machine.
#pragma once

#include <optional>
#include <string>

namespace brimful::kernels {

// 32 hexadecimal digits, from all that a compiled kernel depends on.
std::string cache_key(const std::string& all);

// Whether there is such a file that nobody else may write to; it may be damaged.
bool is_cached(const std::string& key);

// Nothing where there is no such file, it is damaged or another's, or others may write to it or to its folder.
std::optional<std::string> read_cache(const std::string& key);

// Does nothing where the folder cannot be written to, or others may write to it: the kernel is compiled again next time.
void write_cache(const std::string& key, const std::string& cubin) noexcept;

}  // namespace brimful::kernels
