// libtorch's CUDA half, opened at run time.
#pragma once

namespace brimful {

// Null where it is not there; `dlerror` says why.
void* open_cuda();

}  // namespace brimful
