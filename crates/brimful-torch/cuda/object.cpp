// The table by which src/cuda_object.rs finds what this folder can do.
//
// The folder is a shared object of its own, whose symbols stay open until libtorch's CUDA half is
// there: the library carries it, and loads it on machines that have one. So nothing links to CUDA.

#include "functions.h"

extern "C" {

// The same fields as RawCudaFunctions in src/ffi.rs.
struct BrimfulCudaFunctions {
  decltype(&brimful::graph::begin) begin_;
  decltype(&brimful::graph::end) end_;
  decltype(&brimful::graph::replay) replay_;
  decltype(&brimful::graph::drop) drop_;
  decltype(&brimful::memory::share) memory_share_;
  decltype(&brimful::memory::set_share) set_memory_share_;
};

extern const BrimfulCudaFunctions brimful_cuda_functions;
const BrimfulCudaFunctions brimful_cuda_functions = {
    brimful::graph::begin, brimful::graph::end,    brimful::graph::replay,
    brimful::graph::drop,  brimful::memory::share, brimful::memory::set_share};

}  // extern "C"
