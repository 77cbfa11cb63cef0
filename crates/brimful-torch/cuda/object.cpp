// The table by which the bridge finds what this folder can do.
//
// The folder is a shared object of its own, whose symbols stay open until libtorch's CUDA half is
// there: the library carries it, and loads it on machines that have one. So nothing links to CUDA.

#include "functions.h"

extern "C" {

extern const BrimfulCudaFunctions brimful_cuda_functions;
const BrimfulCudaFunctions brimful_cuda_functions{};

}  // extern "C"
