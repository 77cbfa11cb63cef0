// libtorch's CUDA half, opened at run time, and what NVIDIA's driver tells.
//
// One binary serves with and without CUDA: nothing links to it, and no CUDA header is needed to build.

#include "cuda.h"
#include "guard.h"

#include <ATen/Context.h>

using brimful::driver_function;
using brimful::guarded;
using brimful::open_cuda;

void* brimful::open_cuda() { return dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_GLOBAL); }

extern "C" {

// Loads libtorch's CUDA half, which registers its kernels with the libtorch that is running.
int32_t brimful_load_cuda(char** message) noexcept {
  return guarded(message, [] {
    TORCH_CHECK(open_cuda() != nullptr, dlerror());
  });
}

// The newest CUDA version that the driver can serve: 1000 × major + 10 × minor.
int32_t brimful_cuda_driver(int32_t* version, char** message) noexcept {
  return guarded(message, [&] {
    const int failed = driver_function<int(int*)>("cuDriverGetVersion")(version);
    TORCH_CHECK(failed == 0, "the NVIDIA driver answers with error ", failed);
  });
}

int32_t brimful_cuda_name(int32_t index, char** out, char** message) noexcept {
  return guarded(message, [&] {
    char name[256] = {};
    const int failed = driver_function<int(char*, int, int)>("cuDeviceGetName")(
        name, sizeof(name) - 1, index);
    TORCH_CHECK(failed == 0, "the NVIDIA driver answers with error ", failed);
    *out = strdup(name);
  });
}

// Products and convolutions of f32 in TF32, or not; means nothing to a CPU.
int32_t brimful_allow_tf32(bool allowed, char** message) noexcept {
  return guarded(message, [&] {
    at::globalContext().setAllowTF32CuBLAS(allowed);
    at::globalContext().setAllowTF32CuDNN(allowed);
  });
}

// Of convolutions.
int32_t brimful_allows_tf32(bool* allowed, char** message) noexcept {
  return guarded(message, [&] { *allowed = at::globalContext().allowTF32CuDNN(); });
}

}  // extern "C"
