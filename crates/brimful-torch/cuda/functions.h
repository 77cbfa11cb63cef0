// The table by which the bridge calls what this folder can do. It is C++'s alone, and its functions throw: a
// KernelError where libtorch's own operations are to run instead of a kernel.
#pragma once

#include "kernels/functions.h"

namespace brimful::graph {

// Whether what goes to the current stream of the current device is captured.
bool is_capturing();

// A capture on the current stream of the device, into the pool of this id or a new one.
void* begin(int32_t device, const uint64_t* pool);
// With kernels of our own in the place of some nodes, or as it was captured.
void end(void* handle, bool own_kernels, uint64_t* pool);
void replay(void* handle);
void drop(void* handle) noexcept;

}  // namespace brimful::graph

namespace brimful::memory {

double share(int32_t device);
void set_share(int32_t device, double share);

}  // namespace brimful::memory

#define BRIMFUL_FUNCTION(space, name) decltype(&brimful::space::name) name = brimful::space::name
struct BrimfulCudaFunctions {
  BRIMFUL_FUNCTION(graph, is_capturing);
  BRIMFUL_FUNCTION(graph, begin);
  BRIMFUL_FUNCTION(graph, end);
  BRIMFUL_FUNCTION(graph, replay);
  BRIMFUL_FUNCTION(graph, drop);
  BRIMFUL_FUNCTION(memory, share);
  BRIMFUL_FUNCTION(memory, set_share);
  BRIMFUL_FUNCTION(kernels, describe);
  BRIMFUL_FUNCTION(kernels, pretend);
  BRIMFUL_FUNCTION(kernels, cross_entropy);
  BRIMFUL_FUNCTION(kernels, norm_forward);
  BRIMFUL_FUNCTION(kernels, norm_partial_rows);
  BRIMFUL_FUNCTION(kernels, norm_backward);
  BRIMFUL_FUNCTION(kernels, add_halves);
  BRIMFUL_FUNCTION(kernels, column_partial_rows);
  BRIMFUL_FUNCTION(kernels, column_partials);
  BRIMFUL_FUNCTION(kernels, column_sums);
  BRIMFUL_FUNCTION(kernels, add_column_sums);
  BRIMFUL_FUNCTION(kernels, add_scaled_product);
  BRIMFUL_FUNCTION(kernels, rotary);
  BRIMFUL_FUNCTION(kernels, activation);
  BRIMFUL_FUNCTION(kernels, batch_norm_forward);
  BRIMFUL_FUNCTION(kernels, batch_norm_statistics);
  BRIMFUL_FUNCTION(kernels, batch_norm_moments);
  BRIMFUL_FUNCTION(kernels, batch_norm_pool);
  BRIMFUL_FUNCTION(kernels, batch_norm_backward);
};
#undef BRIMFUL_FUNCTION
