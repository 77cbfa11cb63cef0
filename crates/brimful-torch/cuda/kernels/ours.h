// Whether files are this user's and root's alone: code is loaded from no others.
#pragma once

#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>

namespace brimful::kernels {

inline bool is_of_ours(const struct stat& seen) {
  return seen.st_uid == 0 || seen.st_uid == geteuid();
}

// Nobody else may write to it.
inline bool is_ours_alone(const struct stat& seen) {
  return is_of_ours(seen) && (seen.st_mode & (S_IWGRP | S_IWOTH)) == 0;
}

// Nobody else may write to it, nor put another in its place. In a folder such as /tmp others may add files, and leave
// ours alone.
inline bool is_ours_alone(std::filesystem::path path) {
  for (;; path = path.parent_path()) {
    struct stat seen{};
    if (stat(path.c_str(), &seen) != 0) return false;
    const bool leaves_ours = S_ISDIR(seen.st_mode) && (seen.st_mode & S_ISVTX) && is_of_ours(seen);
    if (!leaves_ours && !is_ours_alone(seen)) return false;
    if (path == path.parent_path()) return true;
  }
}

}  // namespace brimful::kernels
