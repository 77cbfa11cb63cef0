// Leaves that a backward may add to: those of a step.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/flat_hash_map.h>

namespace brimful {

class KnownLeaves {
 public:
  void add(const at::Tensor& leaf) { known_.emplace(leaf.unsafeGetTensorImpl(), leaf); }

  bool has(const at::Tensor& leaf) const { return known_.count(leaf.unsafeGetTensorImpl()) != 0; }

 private:
  // Held alive, so that their addresses are not reused.
  ska::flat_hash_map<const at::TensorImpl*, at::Tensor> known_;
};

}  // namespace brimful
