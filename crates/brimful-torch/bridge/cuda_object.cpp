// Loads the shared object of cuda/, which this program carries as bytes, from memory.

#include "guard.h"
#include "kernels.h"

#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>

#include <string>

namespace {

// A file without a name, that the loader can be pointed at.
std::string in_memory(const char* bytes, size_t length) {
  const int file = memfd_create("brimful_cuda.so", MFD_CLOEXEC);
  TORCH_CHECK(file >= 0, "no file in memory can be made: ", strerror(errno));
  for (size_t done = 0; done < length;) {
    const ssize_t written = write(file, bytes + done, length - done);
    TORCH_CHECK(written > 0, "a file in memory cannot be written: ", strerror(errno));
    done += static_cast<size_t>(written);
  }
  return c10::str("/proc/self/fd/", file);
}

}  // namespace

extern "C" {

// Gives the object's table of functions. All of its symbols must be found, so that none is missed
// later; it stays loaded, and its file open, until the process ends.
int32_t brimful_load_cuda_object(
    const char* bytes, size_t length, const void** out, char** message) noexcept {
  return brimful::guarded(message, [&] {
    void* object = dlopen(in_memory(bytes, length).c_str(), RTLD_NOW | RTLD_LOCAL);
    TORCH_CHECK(object != nullptr, dlerror());
    *out = dlsym(object, "brimful_cuda_functions");
    TORCH_CHECK(*out != nullptr, dlerror());
    const void* kernels = dlsym(object, "brimful_kernel_functions");
    TORCH_CHECK(kernels != nullptr, dlerror());
    brimful::kernels::found(static_cast<const BrimfulKernelFunctions*>(kernels));
  });
}

}  // extern "C"
