// A bias and a GELU, or a bias and a SwiGLU: by kernels of our own where there are some, else by libtorch's
// operations.
//
// A SwiGLU's input has twice its output's columns: silu(first half) · second half.

#include "guard.h"
#include "kernels.h"
#include "kernel_tensors.h"
#include "tensors.h"

#include <ATen/ops/add.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/gelu_backward.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/silu_backward.h>
#include <c10/core/DeviceGuard.h>
#include <torch/csrc/autograd/custom_function.h>

using brimful::kernels::Activation;
using brimful::kernels::KernelError;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
namespace kernels = brimful::kernels;

namespace {

const char* approximation(Activation function) {
  return function == Activation::kGeluTanh ? "tanh" : "none";
}

// On x with its bias added.
at::Tensor applied(const at::Tensor& x, Activation function) {
  if (function != Activation::kSwiGlu) return at::gelu(x, approximation(function));
  const auto halves = x.chunk(2, -1);
  return at::silu(halves[0]).mul(halves[1]);
}

at::Tensor by_libtorch(const at::Tensor& x, const at::Tensor& bias, Activation function) {
  return applied(bias.defined() ? at::add(x, bias) : x, function);
}

int64_t outputs_of(const at::Tensor& x, Activation function) {
  return function == Activation::kSwiGlu ? x.size(-1) / 2 : x.size(-1);
}

// Throws a KernelError where it cannot be had.
at::Tensor forward_by_kernel(
    const at::Tensor& given, const at::Tensor& given_bias, Activation function) {
  const at::NoGradGuard no_grad;
  const c10::DeviceGuard there(given.device());
  const auto x = kernels::plain(given);
  const auto bias = kernels::plain(given_bias);
  const auto outputs = outputs_of(x, function);
  auto shape = x.sizes().vec();
  shape.back() = outputs;
  auto out = at::empty(shape, x.options());
  ActivationArguments arguments{};
  arguments.x = x.const_data_ptr();
  arguments.bias = kernels::pointer_or_null(bias);
  arguments.out = out.mutable_data_ptr();
  arguments.rows = x.numel() / x.size(-1);
  arguments.outputs = static_cast<int>(outputs);
  kernels::functions()->activation(arguments, kernels::number_kind(x), function, false);
  return out;
}

struct ActivationGradient {
  at::Tensor of_out, x, bias;
  Activation function;
  bool wants_bias;
  at::Tensor of_x, of_bias;
};

void backward_by_kernel(ActivationGradient& g) {
  const c10::DeviceGuard there(g.x.device());
  const auto x = kernels::plain(g.x);
  const auto bias = kernels::plain(g.bias);
  const auto of_out = kernels::plain(g.of_out);
  const auto kind = kernels::number_kind(x);
  const auto rows = x.numel() / x.size(-1);
  const auto outputs = outputs_of(x, g.function);
  auto of_x = at::empty_like(x);
  at::Tensor partial;
  if (g.wants_bias) {
    const auto blocks = kernels::functions()->activation_row_blocks(rows, outputs, kind);
    partial = at::empty({blocks, x.size(-1)}, x.options().dtype(at::kFloat));
  }
  ActivationArguments arguments{};
  arguments.x = x.const_data_ptr();
  arguments.bias = kernels::pointer_or_null(bias);
  arguments.gradient = of_out.const_data_ptr();
  arguments.of_x = of_x.mutable_data_ptr();
  arguments.partial_bias = partial.defined() ? partial.mutable_data_ptr<float>() : nullptr;
  arguments.rows = rows;
  arguments.outputs = static_cast<int>(outputs);
  kernels::functions()->activation(arguments, kind, g.function, true);
  if (g.wants_bias) g.of_bias = kernels::column_sums(partial, x.scalar_type());
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

struct Activated : torch::autograd::Function<Activated> {
  static at::Tensor forward(
      AutogradContext* context, const at::Tensor& x, const std::optional<at::Tensor>& bias,
      const at::Tensor* done, Activation function) {
    context->save_for_backward({x, bias.value_or(at::Tensor())});
    context->saved_data["function"] = static_cast<int64_t>(function);
    context->set_materialize_grads(false);
    return *done;
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    variable_list out(4);
    if (!gradients[0].defined()) return out;
    kernels::refuse_second_gradient("an activation");
    const auto saved = context->get_saved_variables();
    ActivationGradient g;
    g.of_out = gradients[0];
    g.x = saved[0];
    g.bias = saved[1];
    g.function = static_cast<Activation>(context->saved_data["function"].toInt());
    g.wants_bias = g.bias.defined() && context->needs_input_grad(1);
    kernels::or_else([&] { backward_by_kernel(g); }, [&] { backward_by_libtorch(g); });
    out[0] = g.of_x;
    out[1] = g.of_bias;
    return out;
  }
};

at::Tensor activated(const at::Tensor& x, const at::Tensor& bias, Activation function) {
  const bool has_kernel = kernels::takes(x) && x.numel() > 0 &&
                          (!bias.defined() || kernels::is_alike(x, bias));
  if (!has_kernel) return by_libtorch(x, bias, function);
  at::Tensor done;
  try {
    done = forward_by_kernel(x, bias, function);
  } catch (const KernelError& error) {
    kernels::refused(error.what());
    return by_libtorch(x, bias, function);
  }
  return Activated::apply(x, kernels::optional(bias), &done, function);
}

}  // namespace

extern "C" {

// A null bias: none. The function is a number of `Activation`.
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
    *out = new at::Tensor(activated(*x, bias == nullptr ? at::Tensor() : *bias, which));
  });
}

}  // extern "C"
