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

// For an architecture such as 90: out of the cache, or compiled now and put there. Throws a
// KernelError.
Cubin compiled(const Source& source, const std::vector<std::string>& defines, int architecture);

}  // namespace brimful::kernels
