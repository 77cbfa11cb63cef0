// Base of our autograd nodes: one backward, after which all saved tensors are released. Plain fields cost the host
// a fraction of the time of torch::autograd::Function, which matters where launches dominate.
#pragma once

#include "version.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <memory>
#include <mutex>
#include <utility>

BRIMFUL_READ_AGAIN(
    "torch::autograd::Node, set_history and set_gradient_edge, and how generated nodes keep and "
    "release what they save");

namespace brimful::kernels {

using torch::autograd::compute_requires_grad;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

class KernelNode : public torch::autograd::Node {
 public:
  void release_variables() final {
    const std::lock_guard<std::mutex> alone(mutex_);
    released_ = true;
    let_go();
  }

  variable_list apply(variable_list&& gradients) final {
    const std::lock_guard<std::mutex> alone(mutex_);
    TORCH_CHECK(!released_, torch::autograd::ERR_BACKWARD_TWICE);
    TORCH_CHECK(
        !at::GradMode::is_enabled(), "the gradient of ", what(), " has no gradient of its own: ",
        remedy());
    // Autocast must not affect a backward: an f32 sum stays f32.
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    return backward(std::move(gradients));
  }

  // Returns whether the backward can be split: the node gains from running for its inputs first and for its weights
  // later. False if one kernel computes both.
  virtual bool is_splittable() const { return false; }

 protected:
  virtual const char* what() const = 0;
  // Advice for losses that are differentiated twice.
  virtual const char* remedy() const {
    return "switch kernels of our own off (BRIMFUL_KERNELS=off) where a loss is differentiated twice";
  }
  // Returns a gradient for each edge, or undefined; gradients of outputs may be missing.
  virtual variable_list backward(variable_list&& gradients) = 0;
  virtual void let_go() = 0;

 private:
  bool released_ = false;
};

template <class Node, class... Arguments>
std::shared_ptr<Node> make_node(Arguments&&... arguments) {
  return {new Node(std::forward<Arguments>(arguments)...), torch::autograd::deleteNode};
}

// Creates a node with an edge to each of these inputs, which may be undefined.
template <class Node, class... Tensors>
std::shared_ptr<Node> node_after(const Tensors&... inputs) {
  auto node = make_node<Node>();
  node->set_next_edges(torch::autograd::collect_next_edges(inputs...));
  return node;
}

// Runs `compute`, which returns a tensor or a list, and attaches the node as its history in place of libtorch's
// own.
template <class F>
auto with_history(const std::shared_ptr<KernelNode>& node, F&& compute) {
  const auto untracked = [&] {
    const at::NoGradGuard no_grad;
    return compute();
  };
  auto out = untracked();
  torch::autograd::set_history(out, node);
  return out;
}

}  // namespace brimful::kernels
