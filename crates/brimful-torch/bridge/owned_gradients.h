// Gradients that share no memory with each other, or with anything else that was named before them.
//
// libtorch lets a leaf take over a gradient whose tensor nobody else has, although views of one gradient are
// several tensors: `x + p.view(..) + q.view(..)` leaves p and q with one memory. Whatever is added to one of them
// later would be added to both. So every backward ends here, and who shares gets a copy.
#pragma once

#include "backward_graph.h"

#include <ATen/ops/clone.h>
#include <torch/csrc/autograd/variable.h>

#include <unordered_map>
#include <utility>
#include <vector>

namespace brimful {

class OwnedGradients {
 public:
  void add(const torch::autograd::variable_list& others) {
    for (const at::Tensor& other : others) {
      if (other.defined() && other.has_storage()) is_new(other);
    }
  }

  // The gradient, or a copy of one that is not its owner's alone.
  at::Tensor make(at::Tensor gradient) {
    // Sparse ones have no storage; whoever sums refuses them.
    if (!gradient.defined() || !gradient.has_storage()) return gradient;
    const bool is_own = gradient.is_non_overlapping_and_dense() && is_new(gradient);
    return is_own ? gradient : at::clone(gradient);
  }

  void make_in(const at::Tensor& leaf) {
    at::Tensor& place = leaf.mutable_grad();
    if (place.defined()) place = make(std::move(place));
  }

 private:
  using Range = std::pair<const char*, const char*>;

  // Parts of one storage that do not meet, such as those of a bucket, are each their owner's alone.
  bool is_new(const at::Tensor& tensor) {
    const auto* start = static_cast<const char*>(tensor.const_data_ptr());
    const bool dense = tensor.is_non_overlapping_and_dense();
    const Range range = dense ? Range(start, start + tensor.nbytes()) : whole(tensor);
    auto& taken = taken_[tensor.storage().unsafeGetStorageImpl()];
    for (const auto& [from, to] : taken) {
      if (range.first < to && from < range.second) return false;
    }
    taken.push_back(range);
    return true;
  }

  static Range whole(const at::Tensor& tensor) {
    const auto* start = static_cast<const char*>(tensor.storage().data());
    return {start, start + tensor.storage().nbytes()};
  }

  std::unordered_map<const c10::StorageImpl*, std::vector<Range>> taken_;
};

}  // namespace brimful
