// What all who work on tensors share: lists as they cross the boundary (an array of pointers and its
// length), kinds of numbers, and changes that are counted.
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

// A tensor that may be missing, as it crosses the boundary.
inline at::Tensor or_none(const at::Tensor* tensor) {
  return tensor == nullptr ? at::Tensor() : *tensor;
}

inline bool is_half(at::ScalarType kind) { return kind == at::kHalf || kind == at::kBFloat16; }

// What halves are summed in: they overflow, or are coarse.
inline at::ScalarType sum_kind(at::ScalarType kind) { return is_half(kind) ? at::kFloat : kind; }

// Lets autograd and others know that the numbers were changed by work that libtorch does not count.
inline void count_change(const at::Tensor& tensor) {
  // Those of inference mode have no version.
  if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
}

}  // namespace brimful
