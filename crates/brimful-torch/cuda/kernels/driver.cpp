// Resolves the driver's functions by name, so that the build needs no CUDA header.

#include "driver.h"

#include <c10/util/Exception.h>

#include <string>

namespace brimful::kernels {

namespace {

// Worded like libtorch's own reports, which are recognised as out of memory.
void driver_failed(const char* function, int error) {
  const std::string what = function;
  if (error == kDriverOutOfMemory) {
    throw c10::OutOfMemoryError("CUDA driver error: out of memory in " + what, nullptr);
  }
  const char* name = nullptr;
  driver().error_name.ask(error, &name);
  throw KernelError(what + " failed with " + (name != nullptr ? name : std::to_string(error)));
}

Library open_driver() {
  void* handle = dlopen("libcuda.so.1", RTLD_NOW);
  if (handle == nullptr) throw KernelError(std::string("no NVIDIA driver: ") + dlerror());
  return {handle, "the NVIDIA driver", driver_failed};
}

}  // namespace

const Library& driver_library() {
  static const Library opened = open_driver();
  return opened;
}

const Driver& driver() {
  static const Driver loaded;
  return loaded;
}

void enter_context(int device) {
  void* context = nullptr;
  driver().current_context(&context);
  if (context != nullptr) return;
  int handle = 0;
  driver().device(&handle, device);
  // Never released: libtorch holds the same context until the process ends.
  driver().retain_context(&context, handle);
  driver().set_context(context);
}

}  // namespace brimful::kernels
