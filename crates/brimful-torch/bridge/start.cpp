// Start-up code of every program with the bridge, before `main`: opens CUDA if there is a driver.
//
// The linker takes only those files of a static library whose symbols are used. Every program frees the bridge's
// strings, so that function is defined here and pulls in this file.

#include "cuda.h"

#include <dlfcn.h>

#include <cstdlib>

namespace {

// libtorch checks for CUDA once, at the first call that depends on it (a random seed does). So on a machine with
// an NVIDIA driver CUDA is loaded before `main`. The handle is kept because a call whose result is unused becomes
// a jump, and the loader would then not attribute the call to this program, whose rpath it needs.
void* volatile cuda_at_start =
    dlopen("libcuda.so.1", RTLD_LAZY) != nullptr ? brimful::open_cuda() : nullptr;

}  // namespace

extern "C" void brimful_free_message(char* message) noexcept { free(message); }
