// Leaves that a backward may add to: a step's own.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/flat_hash_map.h>

#include <utility>
#include <vector>

namespace brimful {

class KnownLeaves {
 public:
  void add(at::Tensor leaf) {
    if (known_.insert(leaf.unsafeGetTensorImpl()).second) list_.push_back(std::move(leaf));
  }

  bool has(const at::Tensor& leaf) const { return known_.count(leaf.unsafeGetTensorImpl()) != 0; }

 private:
  ska::flat_hash_set<const at::TensorImpl*> known_;
  // While they live, nobody else has their addresses.
  std::vector<at::Tensor> list_;
};

}  // namespace brimful
