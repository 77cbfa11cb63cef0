// Ownership checks of files: code is loaded only from files that no one but this user and root may write to.
#pragma once

#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>

namespace brimful::kernels {

inline bool is_of_ours(const struct stat& seen) {
  return seen.st_uid == 0 || seen.st_uid == geteuid();
}

// Returns the others who may write to a file: bits of its mode, and one more for another owner.
inline unsigned others_of(const struct stat& seen) {
  constexpr unsigned kOwner = 1u << 31;
  return (seen.st_mode & (S_IWGRP | S_IWOTH)) | (is_of_ours(seen) ? 0 : kOwner);
}

// Returns whether only this user or root may write to the file.
inline bool is_ours_alone(const struct stat& seen) { return others_of(seen) == 0; }

// Returns the others who may write to the path or replace it. In a sticky folder such as /tmp others may add files but
// not replace ours.
inline unsigned others_of(std::filesystem::path path) {
  for (unsigned others = 0;; path = path.parent_path()) {
    struct stat seen{};
    if (stat(path.c_str(), &seen) != 0) return ~0u;
    const bool leaves_ours = S_ISDIR(seen.st_mode) && (seen.st_mode & S_ISVTX) && is_of_ours(seen);
    if (!leaves_ours) others |= others_of(seen);
    if (path == path.parent_path()) return others;
  }
}

}  // namespace brimful::kernels
