// A linear layer and the cross-entropy of its output, in chunks so that large logits are never stored whole.
//
//   hidden  [N × d] ─┬─ chunk of tokens ── logits [c × V] ── gradient of the logits, in their place
//   weight  [V × d] ─┘                         │                  ├── × weight  → rows of hidden's gradient
//   targets [N]     ───────────────────────────┴─ row losses      └── ᵀ × chunk → added to weight's
//
// The forward also computes the gradients of the sum of all row losses. The loss's own gradient, a factor,
// arrives with the backward, which is then one multiplication. If the logits are small beside the weight, their
// gradient is kept for the backward instead, and its products add to the offered sum: no weight gradient is
// written and read again to be scaled.

#include "direct_backward.h"
#include "guard.h"
#include "kernel_node.h"
#include "kernel_tensors.h"
#include "offered_sums.h"
#include "tensors.h"
#include "version.h"

#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <array>
#include <limits>
#include <utility>

using brimful::is_half;
using brimful::or_none;
using brimful::sum_kind;
using namespace brimful::kernels;

BRIMFUL_READ_AGAIN("mm with an output of another kind, which only CUDA has");

namespace {

// Rows of logits on a device begin at multiples of this many elements: products into unaligned rows take three
// times as long.
constexpr int64_t kRowStep = 64;

// The gradient of all logits is kept for the backward if it takes at most this many times the weight gradient's
// memory: that saves several passes over the weight gradient.
constexpr int64_t kMostWaiting = 3;

// Terms of the row losses. The loss of row i with target t is
//   -of_target[i] · log p[t] - of_all[i] · Σ_j class_weight[j] · log p[j]
struct Targets {
  at::Tensor index;      // a class for every row, in the table's range
  at::Tensor counted;    // false for ignored rows
  at::Tensor of_target;  // N × 1
  at::Tensor of_all;     // N × 1; undefined without smoothing
  at::Tensor class_weights;  // undefined if all are one
  at::Tensor total;      // Σ_j class_weight[j], 0-dim; undefined without smoothing
  at::Tensor weight;     // divisor of the sum of losses
};

struct Wanted {
  bool hidden;
  bool weight;
  bool bias;
  bool any() const { return hidden || weight || bias; }
};

// Reads the targets. A target that is not a class makes the loss NaN: reporting it from a device would make the
// host wait.
Targets read(
    const at::Tensor& given, int64_t classes, const at::Tensor& class_weights, double smoothing,
    int64_t ignored, at::ScalarType kind) {
  Targets out;
  const auto targets = given.reshape({-1}).to(at::kLong);
  out.counted = targets.ne(ignored);
  const auto is_class = targets.ge(0).logical_and_(targets.lt(classes));
  out.index = targets.masked_fill(is_class.logical_not(), 0).contiguous();
  auto weights = at::ones({targets.numel()}, targets.options().dtype(kind));
  if (class_weights.defined()) {
    out.class_weights = class_weights.to(kind).contiguous();
    weights = out.class_weights.index_select(0, out.index);
  }
  weights.masked_fill_(is_class.logical_not_(), std::numeric_limits<double>::quiet_NaN());
  weights.masked_fill_(out.counted.logical_not(), 0);
  out.weight = weights.sum(at::kDouble);
  out.of_target = weights.mul(1 - smoothing).unsqueeze_(1);
  if (smoothing > 0) {
    const auto each = smoothing / static_cast<double>(classes);
    out.of_all = out.counted.to(kind).mul_(each).unsqueeze_(1);
    out.total = class_weights.defined() ? out.class_weights.sum()
                                        : at::ones({}, weights.options()).mul_(classes);
  }
  return out;
}

Targets rows_of(const Targets& all, int64_t from, int64_t count) {
  Targets out = all;
  out.index = all.index.narrow(0, from, count);
  out.counted = all.counted.narrow(0, from, count);
  out.of_target = all.of_target.narrow(0, from, count);
  if (all.of_all.defined()) out.of_all = all.of_all.narrow(0, from, count);
  return out;
}

// Overwrites the logits with the gradient of the sum of row losses.
void leave_gradient(at::Tensor& powers, const at::Tensor& sums, const Targets& targets) {
  const bool smooth = targets.of_all.defined();
  const auto index = targets.index.unsqueeze(1);
  auto all = targets.of_target;
  if (smooth) all = all.add(targets.of_all.mul(targets.total));
  powers.mul_(all.div(sums));
  powers.scatter_(1, index, powers.gather(1, index).sub_(targets.of_target));
  if (!smooth) return;
  if (targets.class_weights.defined()) {
    powers.addcmul_(targets.of_all, targets.class_weights.unsqueeze(0), -1);
  } else {
    powers.sub_(targets.of_all);
  }
}

// Computes the losses of rows of logits, which are overwritten: by their gradient, if `gradient` is set.
at::Tensor row_losses(at::Tensor& logits, const Targets& targets, bool gradient) {
  logits.sub_(logits.amax({1}, /*keepdim=*/true));
  auto of_target = logits.gather(1, targets.index.unsqueeze(1));
  at::Tensor of_all;
  if (targets.of_all.defined()) {
    const auto& weights = targets.class_weights;
    of_all = (weights.defined() ? logits.mv(weights) : logits.sum(1)).unsqueeze_(1);
  }
  logits.exp_();
  const auto sums = logits.sum(1, /*keepdim=*/true);
  const auto logs = sums.log();
  auto losses = logs.sub(of_target).mul_(targets.of_target);
  if (of_all.defined()) {
    losses.add_(logs.mul(targets.total).sub_(of_all).mul_(targets.of_all));
  }
  if (gradient) leave_gradient(logits, sums, targets);
  return losses.squeeze_(1).masked_fill_(targets.counted.logical_not(), 0);
}

const float* floats_or_null(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.const_data_ptr<float>() : nullptr;
}

// Computes `row_losses` in one kernel, on logits of the layer's dtype. Returns false if the kernel is not
// available.
bool row_losses_by_kernel(
    at::Tensor& logits, const Targets& targets, bool gradient, at::Tensor& losses) {
  if (!takes(logits)) return false;
  const auto counted = targets.counted.const_data_ptr<bool>();
  const CrossEntropyArguments arguments{
      logits.mutable_data_ptr(),
      reinterpret_cast<const long long*>(targets.index.const_data_ptr<int64_t>()),
      reinterpret_cast<const unsigned char*>(counted),
      targets.of_target.const_data_ptr<float>(),
      floats_or_null(targets.of_all),
      floats_or_null(targets.class_weights),
      floats_or_null(targets.total),
      losses.mutable_data_ptr<float>(),
      logits.stride(0),
      static_cast<int>(logits.size(1)),
      gradient};
  const auto by_kernel = [&] {
    const c10::DeviceGuard there(logits.device());
    functions()->cross_entropy(arguments, number_kind(logits), logits.size(0));
    return true;
  };
  return or_else("linear_cross_entropy", by_kernel, [] { return false; });
}

// Allocates rows, each beginning at an aligned address on a device.
at::Tensor rows(int64_t count, int64_t width, const at::TensorOptions& options) {
  const bool on_device = !options.device().is_cpu();
  const auto step = on_device ? (width + kRowStep - 1) / kRowStep * kRowStep : width;
  return at::empty({count, step}, options).narrow(1, 0, width);
}

// A layer, its input rows, and the results of its losses: gradients, if wanted.
struct Head {
  at::Tensor hidden, weight, bias;
  const Targets& targets;
  const Wanted wanted;
  at::Tensor losses = {};
  // Logits of a chunk, which become their gradient; and an f32 copy, undefined unless half precision needs it.
  at::Tensor logits = {}, exact_logits = {};
  // True if the products of the logits' gradient are deferred to the backward.
  bool waits = false;
  // Gradients so far.
  at::Tensor of_hidden = {}, of_weight = {}, of_bias = {};

  void run(int64_t chunk_bytes) {
    const auto tokens = hidden.size(0);
    waits = can_wait(chunk_bytes);
    const auto chunk = waits ? tokens : tokens_in(chunk_bytes);
    const auto sums = weight.options().dtype(sum_kind(weight.scalar_type()));
    if (wanted.bias) of_bias = at::zeros(bias.sizes(), sums);
    if (wanted.hidden && !waits) of_hidden = at::empty_like(hidden);
    losses = at::empty({tokens}, targets.of_target.options());
    logits = rows(chunk, weight.size(0), hidden.options());
    for (int64_t from = 0; from < tokens; from += chunk) {
      run_chunk(from, std::min(chunk, tokens - from));
    }
    if (tokens == 0 && wanted.weight) of_weight = at::zeros(weight.sizes(), sums);
  }

 private:
  // Returns whether the logits' gradient is deferred to the backward. It then exceeds the weight gradient by at
  // most a chunk's bytes. Half precision without our kernels is summed from an f32 copy, which would have to be
  // kept as well.
  bool can_wait(int64_t chunk_bytes) const {
    const auto kind = hidden.scalar_type();
    if (!wanted.weight || hidden.size(0) == 0 || is_copied()) return false;
    const auto of_sums = weight.numel() * static_cast<int64_t>(c10::elementSize(sum_kind(kind)));
    const auto of_logits = hidden.size(0) * weight.size(0) * static_cast<int64_t>(c10::elementSize(kind));
    return of_logits <= kMostWaiting * of_sums && of_logits <= of_sums + chunk_bytes;
  }

  bool is_copied() const {
    return is_half(hidden.scalar_type()) && !takes(hidden);
  }

  // A power of two, so that nearly equal byte limits give the same chunks and the same order of sums.
  int64_t tokens_in(int64_t chunk_bytes) const {
    const auto tokens = hidden.size(0);
    const auto element = static_cast<int64_t>(hidden.element_size());
    const auto row = weight.size(0) * (is_copied() ? element + 4 : element);
    const auto most = std::max<int64_t>(chunk_bytes / std::max<int64_t>(row, 1), 1);
    if (most >= tokens) return std::max<int64_t>(tokens, 1);
    int64_t power = 1;
    while (power * 2 <= most) power *= 2;
    return power;
  }

  void run_chunk(int64_t from, int64_t count) {
    const auto part = hidden.narrow(0, from, count);
    auto gradient = logits.narrow(0, 0, count);
    if (bias.defined()) {
      at::addmm_out(gradient, bias, part, weight.t());
    } else {
      at::mm_out(gradient, part, weight.t());
    }
    const auto exact = use(gradient, rows_of(targets, from, count), losses.narrow(0, from, count));
    if (wanted.hidden && !waits) {
      auto of_part = of_hidden.narrow(0, from, count);
      at::mm_out(of_part, gradient, weight);
    }
    if (wanted.bias) of_bias.add_(exact.sum({0}, false, of_bias.scalar_type()));
    if (!wanted.weight || waits) return;
    if (part.is_cuda()) {
      brimful::add_product(of_weight, gradient.t(), part);
    } else {
      brimful::add_product(of_weight, exact.t(), part.to(exact.scalar_type()));
    }
  }

  // Computes the losses of a chunk and overwrites its logits by their gradient, if any is wanted. Returns the f32
  // copy of the chunk if there is one, else the chunk.
  at::Tensor use(at::Tensor& chunk, const Targets& of_chunk, at::Tensor its_losses) {
    const bool gradient = wanted.any();
    if (row_losses_by_kernel(chunk, of_chunk, gradient, its_losses)) return chunk;
    auto wide = chunk;
    if (is_half(chunk.scalar_type())) {
      const auto options = logits.options().dtype(at::kFloat);
      if (!exact_logits.defined()) exact_logits = rows(logits.size(0), logits.size(1), options);
      wide = exact_logits.narrow(0, 0, chunk.size(0)).copy_(chunk);
    }
    its_losses.copy_(row_losses(wide, of_chunk, gradient));
    if (gradient && is_half(chunk.scalar_type())) chunk.copy_(wide);
    return wide;
  }
};

// Scales a gradient by the loss's own gradient and converts it to the dtype of its tensor. Half precision is
// multiplied in f32: rounding the factor would lose most of its digits.
at::Tensor scaled(at::Tensor gradient, const at::Tensor& factor, at::ScalarType kind, bool keep) {
  // With a dimension, the factor takes part in type promotion.
  const auto by = factor.to(sum_kind(kind)).reshape({1});
  if (gradient.scalar_type() != kind && gradient.is_cuda()) {
    auto out = at::empty(gradient.sizes(), gradient.options().dtype(kind));
    return at::mul_out(out, gradient, by);
  }
  return (keep ? gradient.mul(by) : gradient.mul_(by)).to(kind);
}

// Adds a gradient, scaled by the loss's own gradient, to the offered sum.
void add_scaled(at::Tensor& sum, at::Tensor gradient, const at::Tensor& factor, bool keep) {
  const auto by = factor.to(sum_kind(gradient.scalar_type())).reshape({1});
  if (sum.defined()) {
    sum.addcmul_(gradient, by);
  } else {
    sum = keep ? gradient.mul(by) : gradient.mul_(by);
  }
}

// Adds factor · gradientᵀ · hidden to the sum, which is created if there is none yet.
void add_scaled_product(
    at::Tensor& sum, const at::Tensor& gradient, const at::Tensor& hidden, const at::Tensor& factor) {
  if (!is_half(hidden.scalar_type())) {
    brimful::add_product(sum, gradient.t(), hidden.mul(factor));
    return;
  }
  const auto on_device = [&] {
    const auto options = hidden.options().dtype(at::kFloat);
    auto out = sum.defined() ? sum : at::zeros({gradient.size(1), hidden.size(1)}, options);
    if (!out.is_contiguous() || out.scalar_type() != at::kFloat) {
      throw KernelError("the sum is not of f32, row by row");
    }
    const auto one = at::ones({}, options), by = factor.to(at::kFloat);
    const ScaledProduct product{
        gradient.const_data_ptr(), hidden.const_data_ptr(), out.mutable_data_ptr<float>(),
        by.const_data_ptr<float>(), one.const_data_ptr<float>(), gradient.size(1), hidden.size(1),
        hidden.size(0), gradient.stride(0), hidden.stride(0)};
    const c10::DeviceGuard there(hidden.device());
    functions()->add_scaled_product(product, number_kind(hidden));
    sum = out;
  };
  or_else("the gradient of a head", on_device, [&] {
    add_scaled(sum, at::mm(gradient.t(), hidden, at::kFloat), factor, /*keep=*/false);
  });
}

// Autograd node. It keeps the gradients, which its backward scales; or the gradient of the logits, if products are
// deferred.
struct LinearCrossEntropyNode final : KernelNode {
  // Edges of the node, in this order.
  enum Input { kHidden, kWeight, kBias };

  std::string name() const override { return "BrimfulLinearCrossEntropyBackward"; }
  const char* what() const override { return "linear_cross_entropy"; }
  const char* remedy() const override {
    return "use a linear layer and cross_entropy where a loss is differentiated twice";
  }

  void let_go() override {
    kept.fill(at::Tensor());
    logits.reset();
    hidden.reset_data();
    weight.reset_data();
  }

  variable_list backward(variable_list&& gradients) override {
    variable_list out(num_outputs());
    if (!gradients[0].defined()) return out;
    const bool keep = brimful::keeps_graph();
    if (logits.defined()) multiply(keep ? logits : std::exchange(logits, {}), gradients[0], out);
    for (size_t i = 0; i < kept.size(); ++i) {
      // Released one by one: together they are as large as the layer.
      auto gradient = keep ? kept[i] : std::exchange(kept[i], {});
      if (!gradient.defined() || !task_should_compute_output(i)) continue;
      auto* sum = i == kWeight ? brimful::offered_sum(weight.unpack()) : nullptr;
      if (sum != nullptr) {
        add_scaled(*sum, std::move(gradient), gradients[0], keep);
      } else {
        out[i] = scaled(std::move(gradient), gradients[0], kind, keep);
      }
    }
    return out;
  }

  // Computes the deferred products.
  void multiply(const at::Tensor& gradient, const at::Tensor& factor, variable_list& out) {
    const auto from = hidden.unpack(), by = weight.unpack();
    if (task_should_compute_output(kHidden)) {
      out[kHidden] = scaled(gradient.mm(by), factor, kind, /*keep=*/false).view(from.sizes());
    }
    if (!task_should_compute_output(kWeight)) return;
    const auto rows = from.reshape({-1, from.size(-1)}).contiguous();
    at::Tensor own;
    auto* sum = brimful::offered_sum(by);
    add_scaled_product(sum == nullptr ? own : *sum, gradient, rows, factor);
    if (sum == nullptr) out[kWeight] = own.to(kind);
  }

  // In the order of the edges; undefined if not wanted or deferred.
  std::array<at::Tensor, 3> kept;
  at::Tensor logits;  // gradient of the logits, if products are deferred
  SavedVariable hidden;  // saved if products are deferred
  SavedVariable weight;
  at::ScalarType kind = at::kFloat;
};

at::Tensor loss_of(
    const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& bias,
    const Targets& targets, const Wanted& wanted, int64_t chunk_bytes) {
  Head head{hidden, weight, bias, targets, wanted};
  at::Tensor loss;
  {
    const at::NoGradGuard no_grad;
    head.hidden = hidden.reshape({-1, hidden.size(-1)}).contiguous();
    head.weight = weight.contiguous();
    head.run(chunk_bytes);
    loss = head.losses.sum();
  }
  if (!wanted.any()) return loss;
  const auto node = node_after<LinearCrossEntropyNode>(hidden, weight, bias);
  if (head.waits) {
    node->logits = head.logits;
    node->hidden = SavedVariable(hidden, false);
  }
  if (head.of_hidden.defined()) head.of_hidden = head.of_hidden.view(hidden.sizes());
  node->kept = {head.of_hidden, head.of_weight, head.of_bias};
  node->weight = SavedVariable(weight, false);
  node->kind = hidden.scalar_type();
  torch::autograd::set_history(loss, node);
  return loss;
}

}  // namespace

extern "C" {

// Returns the sum of row losses and its divisor. Null means no bias or no class weights.
int32_t brimful_linear_cross_entropy(
    const at::Tensor* hidden, const at::Tensor* weight, const at::Tensor* bias,
    const at::Tensor* targets, const at::Tensor* class_weights, double smoothing, int64_t ignored,
    int64_t chunk_bytes, at::Tensor** out, char** message) noexcept {
  return brimful::guarded(message, [&] {
    TORCH_CHECK(
        !compute_requires_grad(or_none(class_weights)),
        "the class weights of a head's loss get no gradient: detach them");
    const auto biases = or_none(bias);
    const Wanted wanted{
        compute_requires_grad(*hidden), compute_requires_grad(*weight), compute_requires_grad(biases)};
    Targets rows;
    {
      const at::NoGradGuard no_grad;
      rows = read(
          *targets, weight->size(0), or_none(class_weights), smoothing, ignored,
          sum_kind(hidden->scalar_type()));
    }
    out[0] = new at::Tensor(loss_of(*hidden, *weight, biases, rows, wanted, chunk_bytes));
    out[1] = new at::Tensor(rows.weight);
  });
}

}  // extern "C"
