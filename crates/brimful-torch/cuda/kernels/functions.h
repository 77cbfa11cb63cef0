// The table by which the bridge calls what this folder can do. It is C++'s alone, and its functions
// throw: a KernelError where libtorch's own operations are to run instead.
#pragma once

#include "batch_norm.h"
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
  decltype(&brimful::kernels::batch_norm_forward) batch_norm_forward;
  decltype(&brimful::kernels::batch_norm_statistics) batch_norm_statistics;
  decltype(&brimful::kernels::batch_norm_pool) batch_norm_pool;
  decltype(&brimful::kernels::batch_norm_backward) batch_norm_backward;
};

}  // extern "C"
