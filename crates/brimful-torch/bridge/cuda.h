// libtorch's CUDA half and NVIDIA's driver, opened at run time.
#pragma once

#include <c10/util/Exception.h>
#include <dlfcn.h>

namespace brimful {

// Null where it is not there; `dlerror` says why.
void* open_cuda();

// A function of NVIDIA's driver, looked up by name because no header of it is needed to build.
template <class Function>
Function* driver_function(const char* name) {
  static void* driver = dlopen("libcuda.so.1", RTLD_NOW);
  TORCH_CHECK(driver != nullptr, "no NVIDIA driver: ", dlerror());
  auto* found = reinterpret_cast<Function*>(dlsym(driver, name));
  TORCH_CHECK(found != nullptr, "the NVIDIA driver has no ", name);
  return found;
}

}  // namespace brimful
