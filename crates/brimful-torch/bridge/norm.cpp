// LayerNorm and RMSNorm, with an addition before them: by kernels of our own where there are some, else
// by libtorch's operations.
//
//   x + residual ─▶ sum ─▶ normed          both come out; without a residual the sum is x

#include "guard.h"
#include "kernels.h"
#include "kernel_tensors.h"
#include "tensors.h"

#include <ATen/ops/add.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/rms_norm.h>
#include <c10/core/DeviceGuard.h>
#include <torch/csrc/autograd/custom_function.h>

using brimful::kernels::KernelError;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
namespace kernels = brimful::kernels;

namespace {

struct NormGiven {
  at::Tensor x;
  at::Tensor residual;  // undefined for none
  at::Tensor weight;    // undefined for none
  at::Tensor bias;      // undefined for none
  double eps;
  bool rms;
};

struct NormDone {
  at::Tensor sum;  // x itself where there is no residual
  at::Tensor out;
  at::Tensor mean;  // undefined for RMSNorm
  at::Tensor scale;
};

bool has_kernel(const NormGiven& given) {
  if (!kernels::takes(given.x) || given.x.numel() == 0) return false;
  for (const auto* other : {&given.residual, &given.weight, &given.bias}) {
    if (other->defined() && !kernels::is_alike(given.x, *other)) return false;
  }
  return true;
}

// Throws a KernelError where it cannot be had.
NormDone forward_by_kernel(const NormGiven& given) {
  const at::NoGradGuard no_grad;
  const c10::DeviceGuard there(given.x.device());
  const auto x = kernels::plain(given.x);
  const auto residual = kernels::plain(given.residual);
  const auto weight = kernels::plain(given.weight);
  const auto bias = kernels::plain(given.bias);
  const auto width = x.size(-1);
  const auto rows = x.numel() / width;
  const auto statistics = x.options().dtype(at::kFloat);
  NormDone done;
  done.sum = residual.defined() ? at::empty_like(x) : x;
  done.out = at::empty_like(x);
  if (!given.rms) done.mean = at::empty({rows}, statistics);
  done.scale = at::empty({rows}, statistics);
  const NormForwardArguments arguments{
      x.const_data_ptr(),
      kernels::pointer_or_null(residual),
      residual.defined() ? done.sum.mutable_data_ptr() : nullptr,
      done.out.mutable_data_ptr(),
      kernels::pointer_or_null(weight),
      kernels::pointer_or_null(bias),
      given.rms ? nullptr : done.mean.mutable_data_ptr<float>(),
      done.scale.mutable_data_ptr<float>(),
      rows,
      static_cast<int>(width),
      static_cast<float>(given.eps)};
  kernels::functions()->norm_forward(arguments, kernels::number_kind(x));
  return done;
}

// What a backward starts from, and what it leaves.
struct NormGradient {
  at::Tensor of_out;
  at::Tensor of_sum;  // undefined where the sum is not used elsewhere
  at::Tensor sum, weight, mean, scale;
  bool wants_weight, wants_bias;
  at::Tensor of_x, of_weight, of_bias;
};

void backward_by_kernel(NormGradient& g) {
  const c10::DeviceGuard there(g.sum.device());
  const auto of_out = kernels::plain(g.of_out);
  const auto of_sum = kernels::plain(g.of_sum);
  const auto width = g.sum.size(-1);
  const auto rows = g.sum.numel() / width;
  const auto kind = kernels::number_kind(g.sum);
  const auto blocks = kernels::functions()->norm_partial_rows(rows, width, kind);
  const auto partial = [&](bool wanted) {
    return wanted ? at::empty({blocks, width}, g.scale.options()) : at::Tensor();
  };
  auto weights = partial(g.wants_weight);
  auto biases = partial(g.wants_bias);
  auto of_x = at::empty_like(g.sum);
  const NormBackwardArguments arguments{
      of_out.const_data_ptr(),
      kernels::pointer_or_null(of_sum),
      g.sum.const_data_ptr(),
      kernels::pointer_or_null(g.weight),
      g.mean.defined() ? g.mean.const_data_ptr<float>() : nullptr,
      g.scale.const_data_ptr<float>(),
      of_x.mutable_data_ptr(),
      weights.defined() ? weights.mutable_data_ptr<float>() : nullptr,
      biases.defined() ? biases.mutable_data_ptr<float>() : nullptr,
      rows,
      0,
      static_cast<int>(width)};
  kernels::functions()->norm_backward(arguments, kind);
  if (g.wants_weight) g.of_weight = kernels::column_sums(weights, g.sum.scalar_type());
  if (g.wants_bias) g.of_bias = kernels::column_sums(biases, g.sum.scalar_type());
  g.of_x = of_x;
}

// The same with libtorch's operations, in f32.
void backward_by_libtorch(NormGradient& g) {
  const auto kind = g.sum.scalar_type();
  const auto width = g.sum.size(-1);
  const auto rows = [&](const at::Tensor& t) { return t.reshape({-1, width}).to(at::kFloat); };
  const auto scale = g.scale.unsqueeze(1);
  auto normed = rows(g.sum);
  if (g.mean.defined()) normed = normed.sub(g.mean.unsqueeze(1));
  normed = normed.mul(scale);
  auto gradient = rows(g.of_out);
  if (g.wants_weight) g.of_weight = gradient.mul(normed).sum(0).to(kind);
  if (g.wants_bias) g.of_bias = gradient.sum(0).to(kind);
  if (g.weight.defined()) gradient = gradient.mul(g.weight.to(at::kFloat));
  auto of_x = gradient.sub(normed.mul(gradient.mul(normed).mean(1, true)));
  if (g.mean.defined()) of_x = of_x.sub(gradient.mean(1, true));
  of_x = of_x.mul(scale);
  if (g.of_sum.defined()) of_x = of_x.add(rows(g.of_sum));
  g.of_x = of_x.to(kind).view_as(g.sum);
}

struct Norm : torch::autograd::Function<Norm> {
  static variable_list forward(
      AutogradContext* context, const at::Tensor& /*x*/, const std::optional<at::Tensor>& residual,
      const std::optional<at::Tensor>& weight, const std::optional<at::Tensor>& bias,
      const NormDone* done) {
    context->save_for_backward(
        {done->sum, weight.value_or(at::Tensor()), done->mean, done->scale});
    context->saved_data["bias"] = bias.has_value();
    context->set_materialize_grads(false);
    if (residual.has_value()) return {done->sum, done->out};
    return {done->out};
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    variable_list out(5);
    const bool adds = gradients.size() == 2;
    NormGradient g;
    g.of_out = gradients.back();
    if (adds) g.of_sum = gradients.front();
    if (!g.of_out.defined()) {
      out[0] = out[1] = g.of_sum;
      return out;
    }
    kernels::refuse_second_gradient("a norm");
    const auto saved = context->get_saved_variables();
    g.sum = saved[0];
    g.weight = saved[1];
    g.mean = saved[2];
    g.scale = saved[3];
    // Only what is there has an edge.
    const size_t weight_edge = adds ? 2 : 1;
    const size_t bias_edge = weight_edge + (g.weight.defined() ? 1 : 0);
    g.wants_weight = g.weight.defined() && context->needs_input_grad(weight_edge);
    g.wants_bias = context->saved_data["bias"].toBool() && context->needs_input_grad(bias_edge);
    kernels::or_else([&] { backward_by_kernel(g); }, [&] { backward_by_libtorch(g); });
    out[0] = g.of_x;
    if (adds) out[1] = g.of_x;
    out[2] = g.of_weight;
    out[3] = g.of_bias;
    return out;
  }
};

NormDone by_libtorch(const NormGiven& given) {
  NormDone done;
  done.sum = given.residual.defined() ? at::add(given.x, given.residual) : given.x;
  const std::vector<int64_t> width{given.x.size(-1)};
  done.out = given.rms ? at::rms_norm(done.sum, width, given.weight, given.eps)
                       : at::layer_norm(done.sum, width, given.weight, given.bias, given.eps);
  return done;
}

NormDone normed(const NormGiven& given) {
  if (!has_kernel(given)) return by_libtorch(given);
  NormDone done;
  try {
    done = forward_by_kernel(given);
  } catch (const KernelError& error) {
    kernels::refused(error.what());
    return by_libtorch(given);
  }
  const auto out = Norm::apply(
      given.x, kernels::optional(given.residual), kernels::optional(given.weight),
      kernels::optional(given.bias), &done);
  done.out = out.back();
  if (given.residual.defined()) done.sum = out.front();
  return done;
}

}  // namespace

extern "C" {

// Null: no residual, weight or bias. `sum` is written where there is a residual.
int32_t brimful_norm(
    const at::Tensor* x, const at::Tensor* residual, const at::Tensor* weight,
    const at::Tensor* bias, double eps, bool rms, at::Tensor** sum, at::Tensor** out,
    char** message) noexcept {
  return brimful::guarded(message, [&] {
    const auto or_none = [](const at::Tensor* t) { return t == nullptr ? at::Tensor() : *t; };
    TORCH_CHECK(x->dim() > 0, "a norm needs rows, but its input has no dimension");
    const NormGiven given{*x, or_none(residual), or_none(weight), or_none(bias), eps, rms};
    TORCH_CHECK(
        residual == nullptr || residual->sizes() == x->sizes(), "a residual of shape ",
        given.residual.sizes(), " does not fit an input of shape ", x->sizes());
    for (const auto* each : {weight, bias}) {
      TORCH_CHECK(
          each == nullptr || (each->dim() == 1 && each->size(0) == x->size(-1)),
          "a norm's weight and bias must have one number for each of the ", x->size(-1),
          " columns");
    }
    auto done = normed(given);
    if (residual != nullptr) *sum = new at::Tensor(std::move(done.sum));
    *out = new at::Tensor(std::move(done.out));
  });
}

}  // extern "C"
