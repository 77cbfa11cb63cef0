// Loads the shared object of cuda/ from bytes embedded in the program, and forwards calls that are not kernels:
// captures and memory limits.

#include "guard.h"
#include "kernels.h"

#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>

#include <string>

using brimful::guarded;
using brimful::kernels::loaded;

namespace {

// Creates an unnamed in-memory file and returns its path for the loader.
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

// Resolves all symbols at once, so that a missing one shows here. The object stays loaded, and its file open,
// until the process ends.
int32_t brimful_load_cuda_object(const char* bytes, size_t length, char** message) noexcept {
  return guarded(message, [&] {
    void* object = dlopen(in_memory(bytes, length).c_str(), RTLD_NOW | RTLD_LOCAL);
    TORCH_CHECK(object != nullptr, dlerror());
    const void* table = dlsym(object, "brimful_cuda_functions");
    TORCH_CHECK(table != nullptr, dlerror());
    brimful::kernels::found(static_cast<const BrimfulCudaFunctions*>(table));
  });
}

int32_t brimful_graph_begin(
    int32_t device, const uint64_t* pool, void** out, char** message) noexcept {
  return guarded(message, [&] { *out = loaded().begin_capture(device, pool); });
}

int32_t brimful_graph_end(
    void* handle, bool own_kernels, uint64_t* pool, char** message) noexcept {
  return guarded(message, [&] { loaded().end_capture(handle, own_kernels, pool); });
}

int32_t brimful_graph_replay(void* handle, char** message) noexcept {
  return guarded(message, [&] { loaded().replay_graph(handle); });
}

void brimful_graph_drop(void* handle) noexcept { brimful::kernels::functions()->drop_graph(handle); }

int32_t brimful_memory_share(int32_t device, double* out, char** message) noexcept {
  return guarded(message, [&] { *out = loaded().memory_share(device); });
}

int32_t brimful_set_memory_share(int32_t device, double share, char** message) noexcept {
  return guarded(message, [&] { loaded().set_memory_share(device, share); });
}

}  // extern "C"
