// A linear layer on a card, whose weight's gradient goes straight into the sum that is offered for it.
//
//   x [rows × inputs] · weight + bias ──▶ out [rows × outputs]
//
//   backward   gradient · weight ──▶ of x
//              gradient · x      ──▶ added to the sum in f32, or given as the weight's gradient
//              columns of it     ──▶ the bias's

#include "column_sums.h"
#include "guard.h"
#include "kernel_node.h"
#include "kernel_tensors.h"
#include "offered_sums.h"
#include "tensors.h"
#include "version.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>
#include <c10/core/DeviceGuard.h>

BRIMFUL_READ_AGAIN("addmm with an output of another kind, which only CUDA has");

using brimful::kernels::KernelNode;
using brimful::kernels::SavedVariable;
using brimful::kernels::variable_list;
namespace kernels = brimful::kernels;

namespace {

// Throws a KernelError where it cannot be had.
at::Tensor of_bias_by_kernel(const at::Tensor& given, const at::Tensor& bias) {
  const at::AutoDispatchBelowADInplaceOrView untracked;
  const c10::DeviceGuard there(given.device());
  const auto matrix = kernels::laid_out(given);
  const auto kind = kernels::number_kind(matrix);
  const auto rows = matrix.size(0), columns = matrix.size(1);
  const auto blocks = kernels::functions()->column_partial_rows(rows, columns, kind);
  const auto partials = at::empty({blocks, columns}, matrix.options().dtype(at::kFloat));
  ColumnPartialsArguments arguments{};
  arguments.from = matrix.const_data_ptr();
  arguments.into = partials.mutable_data_ptr<float>();
  arguments.rows = rows;
  arguments.columns = static_cast<int>(columns);
  kernels::functions()->column_partials(arguments, kind);
  return kernels::columns_summed(partials, bias);
}

// Undefined where it is left to be added up with all others'.
at::Tensor of_bias(const at::Tensor& gradient, const at::Tensor& bias) {
  return kernels::or_else(
      "a bias's gradient", [&] { return of_bias_by_kernel(gradient, bias); },
      [&] { return gradient.sum(0); });
}

// Adds a product to a sum, which is made where there is none yet.
void add_product(at::Tensor& sum, const at::Tensor& a, const at::Tensor& b) {
  const int beta = sum.defined() ? 1 : 0;
  if (!sum.defined()) {
    sum = at::empty({a.size(0), b.size(1)}, a.options().dtype(brimful::sum_kind(a.scalar_type())));
  }
  if (sum.scalar_type() == a.scalar_type()) {
    at::addmm_out(sum, sum, a, b, beta);
  } else {
    at::addmm_out(sum, sum, a, b, sum.scalar_type(), beta);
  }
}

struct ProjectionNode final : KernelNode {
  // The edges, in this order.
  enum Input { kX, kWeight, kBias };

  std::string name() const override { return "BrimfulProjectionBackward"; }
  const char* what() const override { return "a projection"; }
  bool has_halves() const override { return true; }

  void let_go() override {
    x.reset_data();
    weight.reset_data();
    bias.reset_data();
  }

  variable_list backward(variable_list&& gradients) override {
    variable_list out(num_outputs());
    const auto& gradient = gradients[0];
    if (!gradient.defined()) return out;
    if (task_should_compute_output(kX)) {
      const auto by = weight.unpack();
      out[kX] = at::mm(gradient, inputs_first ? by.t() : by);
    }
    if (task_should_compute_output(kWeight)) out[kWeight] = of_weight(gradient);
    if (task_should_compute_output(kBias)) out[kBias] = of_bias(gradient, bias.unpack());
    return out;
  }

  // Undefined where it has gone into the sum.
  at::Tensor of_weight(const at::Tensor& gradient) {
    const auto rows = x.unpack();
    const auto a = inputs_first ? rows.t() : gradient.t();
    const auto& b = inputs_first ? gradient : rows;
    auto* sum = brimful::offered_sum(weight.unpack());
    if (sum == nullptr) return at::mm(a, b);
    add_product(*sum, a, b);
    return {};
  }

  SavedVariable x, weight, bias;
  bool inputs_first = false;
};

// With the kernels switched off, or under autocast, it is libtorch's own layer.
bool is_ours(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  return kernels::takes(x) && x.numel() > 0 && kernels::is_alike(x, weight) &&
         (!bias.defined() || kernels::is_alike(x, bias)) &&
         !at::autocast::is_autocast_enabled(at::kCUDA);
}

at::Tensor multiplied(
    const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias, bool inputs_first) {
  // One kernel for the product and the bias.
  if (!inputs_first) return at::linear(x, weight, bias);
  return bias.defined() ? at::addmm(bias, x, weight) : at::mm(x, weight);
}

at::Tensor projected(
    const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias, bool inputs_first) {
  const bool wanted = kernels::wants_gradient(x) || kernels::wants_gradient(weight) ||
                      kernels::wants_gradient(bias);
  if (!wanted || !at::GradMode::is_enabled() || !is_ours(x, weight, bias)) {
    return multiplied(x, weight, bias, inputs_first);
  }
  const auto node = kernels::node_after<ProjectionNode>(x, weight, bias);
  node->x = SavedVariable(x, false);
  node->weight = SavedVariable(weight, false);
  node->bias = SavedVariable(bias, false);
  node->inputs_first = inputs_first;
  return kernels::with_history(node, [&] { return multiplied(x, weight, bias, inputs_first); });
}

}  // namespace

extern "C" {

// Rows × inputs to rows × outputs; a null bias: none.
int32_t brimful_projection(
    const at::Tensor* x, const at::Tensor* weight, const at::Tensor* bias, bool inputs_first,
    at::Tensor** out, char** message) noexcept {
  return brimful::guarded(message, [&] {
    *out = new at::Tensor(projected(*x, *weight, brimful::or_none(bias), inputs_first));
  });
}

}  // extern "C"
