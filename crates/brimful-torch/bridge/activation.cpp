// Bias with GELU, or bias with SwiGLU: in custom kernels where available, else in libtorch's operations.
//
// A SwiGLU's input has twice its output's columns: silu(first half) · second half.

#include "column_sums.h"
#include "guard.h"
#include "kernel_node.h"
#include "kernel_tensors.h"
#include "tensors.h"
#include "touched.h"

#include <ATen/ops/add.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/gelu_backward.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/silu_backward.h>

using namespace brimful::kernels;

namespace {

const char* approximation(Activation function) {
  return function == Activation::kGeluTanh ? "tanh" : "none";
}

at::Tensor by_libtorch(const at::Tensor& given, const at::Tensor& bias, Activation function) {
  const auto x = bias.defined() ? at::add(given, bias) : given;
  if (function != Activation::kSwiGlu) return at::gelu(x, approximation(function));
  const auto halves = x.chunk(2, -1);
  return at::silu(halves[0]).mul(halves[1]);
}

int64_t outputs_of(const at::Tensor& x, Activation function) {
  return function == Activation::kSwiGlu ? x.size(-1) / 2 : x.size(-1);
}

// Throws a KernelError if the kernel is not available.
at::Tensor forward_by_kernel(
    const at::Tensor& given, const at::Tensor& given_bias, Activation function) {
  const OwnWork own(given);
  brimful::report("brimful::activation", {double(function)}, {&given, &given_bias}, {});
  const auto x = laid_out(given);
  const auto bias = laid_out(given_bias);
  const auto outputs = outputs_of(x, function);
  auto shape = x.sizes().vec();
  shape.back() = outputs;
  auto out = at::empty(shape, x.options());
  ActivationArguments arguments{};
  arguments.x = x.const_data_ptr();
  arguments.bias = pointer_or_null(bias);
  arguments.out = out.mutable_data_ptr();
  arguments.rows = x.numel() / x.size(-1);
  arguments.outputs = static_cast<int>(outputs);
  functions()->activation(arguments, number_kind(x), function, false);
  return out;
}

// Inputs and results of a backward.
struct ActivationGradient {
  at::Tensor of_out, x, bias;
  Activation function;
  bool wants_bias;
  at::Tensor of_x = {}, of_bias = {};
};

void backward_by_kernel(ActivationGradient& g) {
  const OwnWork own(g.x);
  const auto x = laid_out(g.x);
  const auto bias = laid_out(g.bias);
  const auto of_out = laid_out(g.of_out);
  const auto kind = number_kind(x);
  const auto rows = x.numel() / x.size(-1);
  const auto outputs = outputs_of(x, g.function);
  auto of_x = at::empty_like(x);
  at::Tensor partial;
  const auto blocks = functions()->column_partial_rows(rows, outputs, kind);
  if (g.wants_bias) partial = at::empty({blocks, x.size(-1)}, x.options().dtype(at::kFloat));
  ActivationArguments arguments{};
  arguments.x = x.const_data_ptr();
  arguments.bias = pointer_or_null(bias);
  arguments.gradient = of_out.const_data_ptr();
  arguments.of_x = of_x.mutable_data_ptr();
  arguments.partial_bias = partial.defined() ? partial.mutable_data_ptr<float>() : nullptr;
  arguments.rows = rows;
  arguments.outputs = static_cast<int>(outputs);
  functions()->activation(arguments, kind, g.function, true);
  sum_columns({{partial, g.bias, g.of_bias}});
  g.of_x = of_x;
}

void backward_by_libtorch(ActivationGradient& g) {
  const auto x = g.bias.defined() ? g.x.add(g.bias) : g.x;
  if (g.function == Activation::kSwiGlu) {
    const auto halves = x.chunk(2, -1);
    const auto of_gate = at::silu_backward(g.of_out.mul(halves[1]), halves[0]);
    g.of_x = at::cat({of_gate, g.of_out.mul(at::silu(halves[0]))}, -1);
  } else {
    g.of_x = at::gelu_backward(g.of_out, x, approximation(g.function));
  }
  if (g.wants_bias) g.of_bias = g.of_x.reshape({-1, x.size(-1)}).sum(0);
}

struct ActivationNode final : KernelNode {
  // Edges of the node, in this order.
  enum Input { kX, kBias };

  std::string name() const override { return "BrimfulActivationBackward"; }
  const char* what() const override { return "an activation"; }

  void let_go() override {
    x.reset_data();
    bias.reset_data();
  }

  variable_list backward(variable_list&& gradients) override {
    if (!gradients[0].defined()) return variable_list(num_outputs());
    ActivationGradient g{
        gradients[0], x.unpack(), bias.unpack(), function, task_should_compute_output(kBias)};
    or_else(
        "the backward of an activation", [&] { backward_by_kernel(g); },
        [&] { backward_by_libtorch(g); });
    return {g.of_x, g.of_bias};
  }

  SavedVariable x, bias;
  Activation function = Activation::kGeluExact;
};

// Attaches the node to the output if an input requires a gradient.
void attach(
    const at::Tensor& out, const at::Tensor& x, const at::Tensor& bias, Activation function) {
  if (!compute_requires_grad(x, bias)) return;
  const auto node = node_after<ActivationNode>(x, bias);
  node->x = SavedVariable(x, false);
  node->bias = SavedVariable(bias, false);
  node->function = function;
  torch::autograd::set_history(out, node);
}

at::Tensor activated(const at::Tensor& x, const at::Tensor& bias, Activation function) {
  const auto by_operations = [&] { return by_libtorch(x, bias, function); };
  const bool has_kernel = takes(x) && x.numel() > 0 && is_alike(x, bias);
  if (!has_kernel) return by_operations();
  const auto by_kernel = [&] {
    auto out = forward_by_kernel(x, bias, function);
    attach(out, x, bias, function);
    return out;
  };
  return or_else("an activation", by_kernel, by_operations);
}

}  // namespace

extern "C" {

// A null bias means none. `function` is a number of `Activation`.
int32_t brimful_activation(
    const at::Tensor* x, const at::Tensor* bias, int32_t function, at::Tensor** out,
    char** message) noexcept {
  return brimful::guarded(message, [&] {
    const auto which = static_cast<Activation>(function);
    TORCH_CHECK(x->dim() > 0, "an activation with a bias needs rows, but got a number");
    TORCH_CHECK(
        which != Activation::kSwiGlu || x->size(-1) % 2 == 0,
        "a SwiGLU takes an even number of columns, but got ", x->size(-1));
    TORCH_CHECK(
        bias == nullptr || (bias->dim() == 1 && bias->size(0) == x->size(-1)),
        "a bias must have one number for each of the ", x->size(-1), " columns");
    *out = new at::Tensor(activated(*x, brimful::or_none(bias), which));
  });
}

}  // extern "C"
