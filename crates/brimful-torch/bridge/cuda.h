// CUDA libraries of libtorch and NVIDIA's driver, opened at run time.
#pragma once

#include <c10/util/Exception.h>
#include <dlfcn.h>

namespace brimful {

// Returns null if the library is not found; `dlerror` has the reason.
void* open_cuda();

// Returns a function of NVIDIA's driver, by name, so that the build needs no CUDA header.
template <class Function>
Function* driver_function(const char* name) {
  static void* driver = dlopen("libcuda.so.1", RTLD_NOW);
  TORCH_CHECK(driver != nullptr, "no NVIDIA driver: ", dlerror());
  auto* found = reinterpret_cast<Function*>(dlsym(driver, name));
  TORCH_CHECK(found != nullptr, "the NVIDIA driver has no ", name);
  return found;
}

}  // namespace brimful
