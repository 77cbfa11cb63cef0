// CUDA libraries of libtorch, opened at run time, and queries of NVIDIA's driver.
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

// Loads libtorch's CUDA library, which registers its kernels with the running libtorch.
int32_t brimful_load_cuda(char** message) noexcept {
  return guarded(message, [] {
    TORCH_CHECK(open_cuda() != nullptr, dlerror());
  });
}

// Returns the newest CUDA version that the driver supports: 1000 × major + 10 × minor.
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

// Allows or forbids TF32 for f32 products and convolutions; has no effect on a CPU.
int32_t brimful_allow_tf32(bool allowed, char** message) noexcept {
  return guarded(message, [&] {
    at::globalContext().setAllowTF32CuBLAS(allowed);
    at::globalContext().setAllowTF32CuDNN(allowed);
  });
}

// Reports the setting for convolutions.
int32_t brimful_allows_tf32(bool* allowed, char** message) noexcept {
  return guarded(message, [&] { *allowed = at::globalContext().allowTF32CuDNN(); });
}

}  // extern "C"
