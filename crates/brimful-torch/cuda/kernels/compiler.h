// NVRTC, the compiler that comes with libtorch's CUDA libraries, opened at run time.
#pragma once

#include "source.h"

#include <string>
#include <vector>

namespace brimful::kernels {

struct Cubin {
  std::string bytes;
  bool from_cache;
};

// Returns the version, such as 13.0; throws a KernelError if NVRTC is not found.
std::string compiler_version();

// Source and its defines.
struct Compiling {
  Source source;
  std::vector<std::string> defines;
};

// Compiles these on background threads, at most one per core. Skips those that are cached or in progress.
void compile_ahead(const std::vector<Compiling>& all, int architecture);

// Compiles for an architecture such as 90, or takes the result from the cache or from a background thread. New
// results go into the cache. Throws a KernelError or a std::bad_alloc.
Cubin compiled(const Source& source, const std::vector<std::string>& defines, int architecture);

}  // namespace brimful::kernels
