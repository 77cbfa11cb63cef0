// Function table through which the bridge calls this folder. It is used only from C++, and its functions throw: a
// KernelError if libtorch's own operations are to run instead of a kernel.
#pragma once

#include "kernels/functions.h"

namespace brimful::graph {

// Returns whether the current stream of the current device is capturing.
bool is_capturing();

// Begins a capture on the device's current stream, into the pool with this id or a new one.
void* begin(int32_t device, const uint64_t* pool);
// Ends the capture; with `own_kernels`, replaces some of its nodes by custom kernels.
void end(void* handle, bool own_kernels, uint64_t* pool);
void replay(void* handle);
void drop(void* handle) noexcept;

}  // namespace brimful::graph

namespace brimful::memory {

double share(int32_t device);
void set_share(int32_t device, double share);

}  // namespace brimful::memory

#define BRIMFUL_FUNCTION_AS(entry, function) decltype(&brimful::function) entry = brimful::function
#define BRIMFUL_FUNCTION(name) BRIMFUL_FUNCTION_AS(name, kernels::name)
struct BrimfulCudaFunctions {
  BRIMFUL_FUNCTION_AS(is_capturing, graph::is_capturing);
  BRIMFUL_FUNCTION_AS(begin_capture, graph::begin);
  BRIMFUL_FUNCTION_AS(end_capture, graph::end);
  BRIMFUL_FUNCTION_AS(replay_graph, graph::replay);
  BRIMFUL_FUNCTION_AS(drop_graph, graph::drop);
  BRIMFUL_FUNCTION_AS(memory_share, memory::share);
  BRIMFUL_FUNCTION_AS(set_memory_share, memory::set_share);
  BRIMFUL_FUNCTION(describe);
  BRIMFUL_FUNCTION(pretend);
  BRIMFUL_FUNCTION(pretend_failure);
  BRIMFUL_FUNCTION(fail_loads);
  BRIMFUL_FUNCTION(cross_entropy);
  BRIMFUL_FUNCTION(norm_forward);
  BRIMFUL_FUNCTION(norm_partial_rows);
  BRIMFUL_FUNCTION(norm_backward);
  BRIMFUL_FUNCTION(add_halves);
  BRIMFUL_FUNCTION(column_partial_rows);
  BRIMFUL_FUNCTION(column_partials);
  BRIMFUL_FUNCTION(column_sums);
  BRIMFUL_FUNCTION(add_column_sums);
  BRIMFUL_FUNCTION(add_scaled_product);
  BRIMFUL_FUNCTION(update);
  BRIMFUL_FUNCTION(rotary);
  BRIMFUL_FUNCTION(activation);
  BRIMFUL_FUNCTION(batch_norm_forward);
  BRIMFUL_FUNCTION(batch_norm_statistics);
  BRIMFUL_FUNCTION(batch_norm_moments);
  BRIMFUL_FUNCTION(batch_norm_pool);
  BRIMFUL_FUNCTION(batch_norm_backward);
};
#undef BRIMFUL_FUNCTION
#undef BRIMFUL_FUNCTION_AS
