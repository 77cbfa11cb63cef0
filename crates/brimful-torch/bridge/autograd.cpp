// Backward passes from given gradients, and assignment of gradients.

#include "backward_graph.h"
#include "direct_backward.h"
#include "guard.h"
#include "owned_gradients.h"
#include "tensors.h"
#include "version.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/ones_like.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <memory>
#include <optional>
#include <thread>
#include <vector>

BRIMFUL_READ_AGAIN("set_post_acc_grad_hooks, which replaces whatever hook was there");

namespace {

using torch::autograd::variable_list;

// libtorch itself would accept any gradient here and fail much later.
void check_fits(const at::Tensor& tensor, const at::Tensor& gradient) {
  TORCH_CHECK(
      gradient.sizes() == tensor.sizes(), "a gradient of shape ", gradient.sizes(),
      " does not fit a tensor of shape ", tensor.sizes());
  // Half-precision gradients are summed in f32 and may stay in f32.
  const bool wider =
      brimful::is_half(tensor.scalar_type()) && gradient.scalar_type() == at::kFloat;
  TORCH_CHECK(
      (wider || gradient.options().type_equal(tensor.options())) &&
          gradient.device() == tensor.device(),
      "a gradient of ", gradient.toString(), " on ", gradient.device(),
      " does not fit a tensor of ", tensor.toString(), " on ", tensor.device());
}

using Arrived = void (*)(void* context, size_t parameter);

// Reports a parameter's accumulated gradient if it is on a CPU and arrives on the thread that created the watch. On
// other threads the callback would not be safe, and on other devices the values are not computed yet.
struct Watch final : torch::autograd::PostAccumulateGradHook {
  Watch(Arrived arrived, void* context, size_t parameter)
      : arrived(arrived), context(context), parameter(parameter) {}
  void operator()(const at::Tensor& tensor) override {
    if (tensor.is_cpu() && std::this_thread::get_id() == thread) arrived(context, parameter);
  }
  const Arrived arrived;
  void* const context;
  const size_t parameter;
  const std::thread::id thread = std::this_thread::get_id();
};

// Watches parameters as long as this object lives.
struct Watches {
  Watches(at::Tensor* const* parameters, size_t count, Arrived arrived, void* context) {
    for (size_t i = 0; i < count; ++i) {
      list.push_back(*parameters[i]);
      auto watch = std::make_unique<Watch>(arrived, context, i);
      torch::autograd::impl::set_post_acc_grad_hooks(list.back(), std::move(watch));
    }
  }
  ~Watches() {
    for (const at::Tensor& parameter : list) {
      torch::autograd::impl::set_post_acc_grad_hooks(parameter, nullptr);
    }
  }
  std::vector<at::Tensor> list;
};

// Collects the roots and their gradients. Returns none if libtorch must refuse one of them and report why.
std::optional<brimful::DirectBackward> directly(
    const variable_list& roots, const variable_list& gradients, bool keep_graph) {
  brimful::DirectBackward direct;
  direct.keep_graph = keep_graph;
  for (size_t i = 0; i < roots.size(); ++i) {
    if (!roots[i].requires_grad() || (!gradients[i].defined() && roots[i].numel() != 1)) {
      return std::nullopt;
    }
    direct.add(
        torch::autograd::impl::gradient_edge(roots[i]),
        gradients[i].defined() ? gradients[i] : at::ones_like(roots[i]));
  }
  return direct;
}

// Returns the tensors that are leaves and require a gradient.
variable_list leaves_of(at::Tensor* const* tensors, size_t count) {
  variable_list leaves;
  for (size_t i = 0; i < count; ++i) {
    if (tensors[i]->is_leaf() && tensors[i]->requires_grad()) leaves.push_back(*tensors[i]);
  }
  return leaves;
}

// Runs the backward. If `known` is given and a reached leaf is neither known nor an end (the start of a stage),
// returns that leaf and runs nothing.
at::Tensor backward(
    const variable_list& roots, const variable_list& gradients, bool keep_graph,
    const brimful::KnownLeaves* known, const variable_list& ends) {
  auto direct = directly(roots, gradients, keep_graph);
  brimful::BackwardGraph graph;
  if (direct) {
    torch::autograd::edge_list edges;
    for (const auto& end : ends) edges.push_back(torch::autograd::impl::gradient_edge(end));
    graph.add_ends(edges);
    graph.add_roots(direct->roots);
    const auto other = known != nullptr ? graph.other_leaf(*known) : at::Tensor();
    if (other.defined()) return other;
  }
  if (!direct || !direct->run(graph)) torch::autograd::backward(roots, gradients, keep_graph);
  brimful::OwnedGradients owned;
  // An end's gradient may share memory with the root's: it is only passed to the previous stage, as the gradient
  // of a root there.
  for (const at::Tensor& end : ends) owned.make_in(end);
  owned.add(gradients);
  for (const at::Tensor& leaf : graph.leaves) owned.make_in(leaf);
  return at::Tensor();
}

}  // namespace

extern "C" {

// A null gradient means 1, for a scalar root. If `known` is not null and the roots lead to a leaf that is neither
// known nor an end, returns that leaf in `other` and runs nothing.
int32_t brimful_backward(
    at::Tensor* const* roots, at::Tensor* const* gradients, size_t count, bool keep_graph,
    const brimful::KnownLeaves* known, at::Tensor* const* ends, size_t end_count,
    at::Tensor** other, char** message) noexcept {
  return brimful::guarded(message, [&] {
    variable_list with;
    for (size_t i = 0; i < count; ++i) with.push_back(brimful::or_none(gradients[i]));
    const auto from = brimful::list_of(roots, count);
    const auto leaf = backward(from, with, keep_graph, known, leaves_of(ends, end_count));
    if (leaf.defined()) *other = new at::Tensor(leaf);
  });
}

// While the watches live, `arrived` is called for each parameter whose gradient has been accumulated.
int32_t brimful_watch(
    at::Tensor* const* parameters, size_t count, Arrived arrived, void* context, Watches** out,
    char** message) noexcept {
  return brimful::guarded(
      message, [&] { *out = new Watches(parameters, count, arrived, context); });
}

void brimful_unwatch(Watches* watches) noexcept { delete watches; }

bool brimful_is_same(const at::Tensor* one, const at::Tensor* other) noexcept {
  return one->is_same(*other);
}

void brimful_count_change(const at::Tensor* tensor) noexcept { brimful::count_change(*tensor); }

// A null gradient removes the present one, so that the next backward allocates a new one.
int32_t brimful_set_gradient(
    at::Tensor* tensor, const at::Tensor* gradient, char** message) noexcept {
  return brimful::guarded(message, [&] {
    if (gradient != nullptr) check_fits(*tensor, *gradient);
    tensor->mutable_grad() = gradient == nullptr ? at::Tensor() : *gradient;
  });
}

}  // extern "C"
