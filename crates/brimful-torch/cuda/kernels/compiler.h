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

// Such as 13.0; a KernelError where NVRTC is not found.
std::string compiler_version();

// A source, and the words that it is compiled with.
struct Compiling {
  Source source;
  std::vector<std::string> defines;
};

// Has these compiled for later, on threads of their own: at most one for each of the machine's cores. What
// is in the cache already, or under way, is passed over.
void compile_ahead(const std::vector<Compiling>& all, int architecture);

// For an architecture such as 90: out of the cache, compiled ahead, or compiled now and put into the cache.
// Throws a KernelError, or a std::bad_alloc.
Cubin compiled(const Source& source, const std::vector<std::string>& defines, int architecture);

}  // namespace brimful::kernels
