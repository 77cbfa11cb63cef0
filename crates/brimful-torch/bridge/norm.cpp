// LayerNorm and RMSNorm, with a fused residual addition: in custom kernels where available, else in libtorch's
// operations.
//
//   x + residual ─▶ sum ─▶ normed          both come out; without a residual the sum is x
//
// If x is also used outside the norm, x passes through the node as the sum does. The norm's backward then adds
// both gradients in its own pass.

#include "column_sums.h"
#include "guard.h"
#include "kernel_node.h"
#include "kernel_tensors.h"
#include "tensors.h"
#include "touched.h"

#include <ATen/ops/add.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/rms_norm.h>

using brimful::or_none;
using namespace brimful::kernels;

namespace {

struct NormGiven {
  at::Tensor x;
  at::Tensor residual;  // undefined if none
  at::Tensor weight;    // undefined if none
  at::Tensor bias;      // undefined if none
  double eps;
  bool rms;
  bool gives_sum;
};

struct NormDone {
  at::Tensor sum;  // x itself without a residual
  at::Tensor out;
  // In f32: the inverse deviations of all rows, then their means, which RMSNorm lacks.
  at::Tensor statistics;
};

bool has_kernel(const NormGiven& given) {
  const auto alike = [&](const at::Tensor& other) { return is_alike(given.x, other); };
  return takes(given.x) && given.x.numel() > 0 && alike(given.residual) &&
         alike(given.weight) && alike(given.bias);
}

// Throws a KernelError if the kernel is not available.
NormDone forward_by_kernel(const NormGiven& given) {
  const OwnWork own(given.x);
  brimful::report(
      "brimful::norm", {given.eps, double(given.rms)},
      {&given.x, &given.residual, &given.weight, &given.bias}, {});
  const auto x = laid_out(given.x);
  const auto residual = laid_out(given.residual);
  const auto weight = laid_out(given.weight);
  const auto bias = laid_out(given.bias);
  const auto width = x.size(-1);
  const auto rows = x.numel() / width;
  NormDone done;
  done.sum = residual.defined() ? at::empty_like(x) : x;
  done.out = at::empty_like(x);
  done.statistics = at::empty({given.rms ? rows : 2 * rows}, x.options().dtype(at::kFloat));
  auto* scale = done.statistics.mutable_data_ptr<float>();
  const NormForwardArguments arguments{
      x.const_data_ptr(),
      pointer_or_null(residual),
      residual.defined() ? done.sum.mutable_data_ptr() : nullptr,
      done.out.mutable_data_ptr(),
      pointer_or_null(weight),
      pointer_or_null(bias),
      given.rms ? nullptr : scale + rows,
      scale,
      rows,
      static_cast<int>(width),
      static_cast<float>(given.eps)};
  functions()->norm_forward(arguments, number_kind(x));
  return done;
}

// Inputs and results of a backward.
struct NormGradient {
  at::Tensor of_out;
  at::Tensor of_sum;  // undefined if the sum is not used elsewhere
  at::Tensor sum, weight, bias, statistics;
  bool rms;
  bool wants_weight, wants_bias;
  at::Tensor of_x = {}, of_weight = {}, of_bias = {};

  int64_t width() const { return sum.size(-1); }
  int64_t rows() const { return sum.numel() / width(); }
};

void backward_by_kernel(NormGradient& g) {
  const OwnWork own(g.sum);
  const auto of_out = laid_out(g.of_out);
  const auto of_sum = laid_out(g.of_sum);
  const auto weight = laid_out(g.weight);
  const auto kind = number_kind(g.sum);
  const auto blocks = functions()->norm_partial_rows(g.rows(), g.width(), kind);
  const int weights = g.wants_weight ? 1 : 0, biases = g.wants_bias ? 1 : 0;
  const auto partials = at::empty({weights + biases, blocks, g.width()}, g.statistics.options());
  const auto of_weight = g.wants_weight ? partials[0] : at::Tensor();
  const auto of_bias = g.wants_bias ? partials[weights] : at::Tensor();
  const auto* scale = g.statistics.const_data_ptr<float>();
  auto of_x = at::empty_like(g.sum);
  const NormBackwardArguments arguments{
      of_out.const_data_ptr(),
      pointer_or_null(of_sum),
      g.sum.const_data_ptr(),
      pointer_or_null(weight),
      g.rms ? nullptr : scale + g.rows(),
      scale,
      of_x.mutable_data_ptr(),
      g.wants_weight ? of_weight.mutable_data_ptr<float>() : nullptr,
      g.wants_bias ? of_bias.mutable_data_ptr<float>() : nullptr,
      g.rows(),
      0,
      static_cast<int>(g.width())};
  functions()->norm_backward(arguments, kind);
  sum_columns({{of_weight, g.weight, g.of_weight}, {of_bias, g.bias, g.of_bias}});
  g.of_x = of_x;
}

// Computes the backward with libtorch's operations, in f32.
void backward_by_libtorch(NormGradient& g) {
  const auto kind = g.sum.scalar_type();
  const auto rows = [&](const at::Tensor& t) { return t.reshape({-1, g.width()}).to(at::kFloat); };
  const auto scale = g.statistics.narrow(0, 0, g.rows()).unsqueeze(1);
  auto normed = rows(g.sum);
  if (!g.rms) normed = normed.sub(g.statistics.narrow(0, g.rows(), g.rows()).unsqueeze(1));
  normed = normed.mul(scale);
  auto gradient = rows(g.of_out);
  if (g.wants_weight) g.of_weight = gradient.mul(normed).sum(0).to(kind);
  if (g.wants_bias) g.of_bias = gradient.sum(0).to(kind);
  if (g.weight.defined()) gradient = gradient.mul(g.weight.to(at::kFloat));
  auto of_x = gradient.sub(normed.mul(gradient.mul(normed).mean(1, true)));
  if (!g.rms) of_x = of_x.sub(gradient.mean(1, true));
  of_x = of_x.mul(scale);
  if (g.of_sum.defined()) of_x = of_x.add(rows(g.of_sum));
  g.of_x = of_x.to(kind).view_as(g.sum);
}

// Autograd node. Its outputs are the sum, if requested, and the normalised values.
struct NormNode final : KernelNode {
  // Edges of the node, in this order.
  enum Input { kX, kResidual, kWeight, kBias };

  std::string name() const override { return "BrimfulNormBackward"; }
  const char* what() const override { return "a norm"; }

  void let_go() override {
    sum.reset_data();
    weight.reset_data();
    bias.reset_data();
    statistics.reset();
  }

  variable_list backward(variable_list&& gradients) override {
    const auto of_sum = gives_sum ? gradients.front() : at::Tensor();
    if (!gradients.back().defined()) return {of_sum, adds ? of_sum : at::Tensor(), {}, {}};
    NormGradient g{
        gradients.back(), of_sum, sum.unpack(shared_from_this()), weight.unpack(), bias.unpack(),
        statistics, rms, task_should_compute_output(kWeight), task_should_compute_output(kBias)};
    or_else(
        "the backward of a norm", [&] { backward_by_kernel(g); }, [&] { backward_by_libtorch(g); });
    return {g.of_x, adds ? g.of_x : at::Tensor(), g.of_weight, g.of_bias};
  }

  SavedVariable sum, weight, bias;
  at::Tensor statistics;
  bool adds = false, gives_sum = false, rms = false;
};

// Attaches the node to the outputs if an input requires a gradient.
void attach(const NormGiven& given, NormDone& done) {
  const auto& [x, residual, weight, bias, eps, rms, gives_sum] = given;
  const auto rows = done.sum;
  // Returns x itself, not the copy that was made for the kernel.
  if (!residual.defined()) done.sum = x;
  if (!compute_requires_grad(x, residual, weight, bias)) return;
  const auto node = node_after<NormNode>(x, residual, weight, bias);
  node->adds = residual.defined();
  node->rms = rms;
  node->statistics = done.statistics;
  node->gives_sum = gives_sum;
  // A view with its own history: if x or the view is changed in place, libtorch gives the other a new history.
  if (gives_sum && !node->adds) done.sum = x.alias();
  if (gives_sum) torch::autograd::set_history(done.sum, node);
  torch::autograd::set_history(done.out, node);
  node->sum = SavedVariable(rows, gives_sum && node->adds);
  node->weight = SavedVariable(weight, false);
  node->bias = SavedVariable(bias, false);
}

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
  const auto by_kernel = [&] {
    auto done = forward_by_kernel(given);
    attach(given, done);
    return done;
  };
  return or_else("a norm", by_kernel, [&] { return by_libtorch(given); });
}

}  // namespace

extern "C" {

// Null means no residual, weight or bias, or no request for the sum.
int32_t brimful_norm(
    const at::Tensor* x, const at::Tensor* residual, const at::Tensor* weight,
    const at::Tensor* bias, double eps, bool rms, at::Tensor** sum, at::Tensor** out,
    char** message) noexcept {
  return brimful::guarded(message, [&] {
    TORCH_CHECK(x->dim() > 0, "a norm needs rows, but its input has no dimension");
    const NormGiven given{
        *x, or_none(residual), or_none(weight), or_none(bias), eps, rms, sum != nullptr};
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
    if (sum != nullptr) *sum = new at::Tensor(std::move(done.sum));
    *out = new at::Tensor(std::move(done.out));
  });
}

}  // extern "C"
