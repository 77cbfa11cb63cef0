// The table by which the bridge calls what this folder can do. It is C++'s alone, and its functions
// throw: a KernelError where libtorch's own operations are to run instead.
#pragma once

#include "card.h"
#include "source.h"

#include <string>

namespace brimful::kernels {

// For what the device's kernels are compiled, and by what, such as "sm_90, NVRTC 13.0".
std::string describe(int device);

}  // namespace brimful::kernels

extern "C" {

struct BrimfulKernelFunctions {
  decltype(&brimful::kernels::describe) describe;
  decltype(&brimful::kernels::pretend) pretend;
};

}  // extern "C"
