// Lists of tensors as they cross the boundary: an array of pointers and its length.
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

}  // namespace brimful
