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
const BrimfulKernelFunctions brimful_kernel_functions = {
    brimful::kernels::describe,
    brimful::kernels::pretend,
    brimful::kernels::is_capturing,
    brimful::kernels::cross_entropy,
    brimful::kernels::norm_forward,
    brimful::kernels::norm_partial_rows,
    brimful::kernels::norm_backward,
    brimful::kernels::add_halves,
    brimful::kernels::column_partial_rows,
    brimful::kernels::column_partials,
    brimful::kernels::column_sums,
    brimful::kernels::add_column_sums,
    brimful::kernels::add_scaled_product,
    brimful::kernels::rotary,
    brimful::kernels::activation_row_blocks,
    brimful::kernels::activation,
    brimful::kernels::batch_norm_forward,
    brimful::kernels::batch_norm_statistics,
    brimful::kernels::batch_norm_moments,
    brimful::kernels::batch_norm_pool,
    brimful::kernels::batch_norm_backward};

}  // extern "C"
