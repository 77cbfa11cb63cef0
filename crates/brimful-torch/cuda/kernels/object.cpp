// The table by which the bridge finds what this folder can do.

#include "functions.h"

#include "compiler.h"
#include "kernel.h"

namespace brimful::kernels {

std::string describe(int device) {
  return "sm_" + std::to_string(architecture(device)) + ", NVRTC " + compiler_version();
}

}  // namespace brimful::kernels

extern "C" {

extern const BrimfulKernelFunctions brimful_kernel_functions;
const BrimfulKernelFunctions brimful_kernel_functions = {
    brimful::kernels::describe, brimful::kernels::pretend};

}  // extern "C"
