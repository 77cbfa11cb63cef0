// Function table through which the bridge finds this folder's functions.
//
// The folder is a separate shared object whose symbols stay unresolved until libtorch's CUDA library is loaded:
// the Rust library embeds it and loads it on machines with CUDA. So nothing links to CUDA.

#include "functions.h"

extern "C" {

extern const BrimfulCudaFunctions brimful_cuda_functions;
const BrimfulCudaFunctions brimful_cuda_functions{};

}  // extern "C"
