// Backward passes that start from given gradients, and gradients put in place by hand.

#include "guard.h"

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/autograd.h>

namespace {

// libtorch itself would take any gradient here, and fail far away.
void check_fits(const at::Tensor& tensor, const at::Tensor& gradient) {
  TORCH_CHECK(
      gradient.sizes() == tensor.sizes(), "a gradient of shape ", gradient.sizes(),
      " does not fit a tensor of shape ", tensor.sizes());
  TORCH_CHECK(
      gradient.options().type_equal(tensor.options()) && gradient.device() == tensor.device(),
      "a gradient of ", gradient.toString(), " on ", gradient.device(),
      " does not fit a tensor of ", tensor.toString(), " on ", tensor.device());
}

}  // namespace

extern "C" {

// A null gradient stands for the default: one, for a scalar root.
int32_t brimful_backward(
    at::Tensor* const* roots, at::Tensor* const* gradients, size_t count, bool keep_graph,
    char** message) noexcept {
  return brimful::guarded(message, [&] {
    torch::autograd::variable_list from;
    torch::autograd::variable_list with;
    for (size_t i = 0; i < count; ++i) {
      from.push_back(*roots[i]);
      with.push_back(gradients[i] == nullptr ? at::Tensor() : *gradients[i]);
    }
    torch::autograd::backward(from, with, keep_graph);
  });
}

// A null gradient removes it, so that the next backward allocates its own.
int32_t brimful_set_gradient(
    at::Tensor* tensor, const at::Tensor* gradient, char** message) noexcept {
  return brimful::guarded(message, [&] {
    if (gradient != nullptr) check_fits(*tensor, *gradient);
    tensor->mutable_grad() = gradient == nullptr ? at::Tensor() : *gradient;
  });
}

}  // extern "C"
