// What every program with the bridge in it does before `main`: it opens CUDA where there is a driver.
//
// Of a static library the linker takes only the files that somebody asks for. Everybody gives back
// the texts that the bridge hands out, so that function lives here, and brings the rest along.

#include "cuda.h"

#include <dlfcn.h>

#include <cstdlib>

namespace {

// libtorch asks once and for all whether CUDA is there, at the first call that cares (a random seed
// does). So on a machine with an NVIDIA driver it is loaded before `main`. The handle is kept because
// a call whose result nobody uses becomes a jump, and the loader would then not see that it is this
// program that calls, whose rpath it needs.
void* volatile cuda_at_start =
    dlopen("libcuda.so.1", RTLD_LAZY) != nullptr ? brimful::open_cuda() : nullptr;

}  // namespace

extern "C" void brimful_free_message(char* message) noexcept { free(message); }
