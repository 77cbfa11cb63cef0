// The table by which the bridge finds what this folder can do.

#include "functions.h"

#include "compiler.h"
#include "kernel.h"

#include <c10/cuda/CUDAStream.h>

namespace brimful::kernels {

bool is_capturing() {
  auto status = cudaStreamCaptureStatusNone;
  if (cudaStreamIsCapturing(c10::cuda::getCurrentCUDAStream(), &status) != cudaSuccess) {
    // It would be told of by whatever is launched next.
    cudaGetLastError();
    return false;
  }
  return status == cudaStreamCaptureStatusActive;
}

std::string describe(int device) {
  return "sm_" + std::to_string(architecture(device)) + ", NVRTC " + compiler_version();
}

}  // namespace brimful::kernels

extern "C" {

extern const BrimfulKernelFunctions brimful_kernel_functions;
const BrimfulKernelFunctions brimful_kernel_functions{};

}  // extern "C"
