// Shared helpers for tensors: lists as they cross the boundary (an array of pointers and its length), dtypes, and
// version counters.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>

#include <cstddef>
#include <vector>

namespace brimful {

inline std::vector<at::Tensor> list_of(const at::Tensor* const* tensors, size_t count) {
  std::vector<at::Tensor> list;
  list.reserve(count);
  for (size_t i = 0; i < count; ++i) list.push_back(*tensors[i]);
  return list;
}

// Returns a tensor from a pointer that may be null.
inline at::Tensor or_none(const at::Tensor* tensor) {
  return tensor == nullptr ? at::Tensor() : *tensor;
}

inline bool is_half(at::ScalarType kind) { return kind == at::kHalf || kind == at::kBFloat16; }

// Returns the dtype for sums: half precision overflows or loses digits.
inline at::ScalarType sum_kind(at::ScalarType kind) { return is_half(kind) ? at::kFloat : kind; }

// Increments the version after a change that libtorch does not count, so that autograd sees it.
inline void count_change(const at::Tensor& tensor) {
  // Inference tensors have no version.
  if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
}

}  // namespace brimful
