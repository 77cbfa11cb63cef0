// Gradients that share memory neither with each other nor with tensors added before them.
//
// libtorch lets a leaf adopt a gradient whose tensor has no other user, but views of one gradient are several
// tensors: `x + p.view(..) + q.view(..)` leaves p and q sharing memory. A later addition to one would change
// both. So every backward ends here, and gradients that share memory are copied.
#pragma once

#include <ATen/core/grad_mode.h>
#include <ATen/ops/clone.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <unordered_map>
#include <utility>
#include <vector>

namespace brimful {

class OwnedGradients {
 public:
  void add(const torch::autograd::variable_list& others) {
    for (const at::Tensor& other : others) {
      if (other.defined() && other.has_storage()) ranges_of(other).push_back(range_of(other));
    }
  }

  // Returns the gradient, or a copy if its memory has another user.
  at::Tensor make(const at::Tensor& gradient) {
    // Sparse tensors have no storage; code that sums gradients refuses them.
    if (!gradient.defined() || !gradient.has_storage()) return gradient;
    auto& taken = ranges_of(gradient);
    const Range range = range_of(gradient);
    const auto meets = [&](const Range& other) {
      return range.first < other.second && other.first < range.second;
    };
    const bool is_own = gradient.is_non_overlapping_and_dense() &&
                        std::none_of(taken.begin(), taken.end(), meets);
    if (is_own) {
      taken.push_back(range);
      return gradient;
    }
    const at::NoGradGuard no_grad;
    return at::clone(gradient);
  }

  // Gives the leaf a gradient of its own. Writes only if a copy was made: if memory runs out, the leaf keeps its
  // gradient.
  void make_in(const at::Tensor& leaf) {
    const at::Tensor& place = leaf.mutable_grad();
    if (!place.defined()) return;
    at::Tensor own = make(place);
    if (!own.is_same(place)) leaf.mutable_grad() = std::move(own);
  }

 private:
  using Range = std::pair<const char*, const char*>;

  // Disjoint parts of one storage, such as those of a bucket, do not share memory.
  static Range range_of(const at::Tensor& tensor) {
    if (!tensor.is_non_overlapping_and_dense()) return whole(tensor);
    const auto* start = static_cast<const char*>(tensor.const_data_ptr());
    return {start, start + tensor.nbytes()};
  }

  std::vector<Range>& ranges_of(const at::Tensor& tensor) {
    return taken_[tensor.storage().unsafeGetStorageImpl()];
  }

  static Range whole(const at::Tensor& tensor) {
    const auto* start = static_cast<const char*>(tensor.storage().data());
    return {start, start + tensor.storage().nbytes()};
  }

  std::unordered_map<const c10::StorageImpl*, std::vector<Range>> taken_;
};

}  // namespace brimful
