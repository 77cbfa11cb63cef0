// BatchNorm fused with ReLU and an addition or a pooling: in custom kernels where available, else in libtorch's
// operations, in place where no other consumer needs the values.

#include "../cuda/kernels/batch_norm.h"

#include "guard.h"
#include "kernel_node.h"
#include "kernel_tensors.h"
#include "mirrored.h"
#include "tensors.h"
#include "touched.h"

#include <ATen/ATen.h>

#include <tuple>
#include <utility>

using brimful::guarded;
using brimful::or_none;
using namespace brimful::kernels;

namespace {

BatchNormGiven norm_of(const BrimfulNorm& raw) {
  return {
      *raw.x, or_none(raw.weight), or_none(raw.bias), or_none(raw.running_mean),
      or_none(raw.running_variance), raw.training, raw.momentum, raw.eps};
}

at::MemoryFormat channels_last(const at::Tensor& x) {
  if (x.dim() == 4) return at::MemoryFormat::ChannelsLast;
  return x.dim() == 5 ? at::MemoryFormat::ChannelsLast3d : at::MemoryFormat::Contiguous;
}

// Returns whether the kernels accept this per-channel tensor: it is absent, or has one number for each channel, in
// f32 or the input's dtype.
bool serves(const at::Tensor& of_channels, const at::Tensor& x) {
  if (!of_channels.defined()) return true;
  return of_channels.device() == x.device() && of_channels.is_contiguous() &&
         of_channels.dim() == 1 && of_channels.numel() == x.size(1) &&
         (of_channels.scalar_type() == at::kFloat || of_channels.scalar_type() == x.scalar_type());
}

bool same_kind(const at::Tensor& a, const at::Tensor& b) {
  return !a.defined() || !b.defined() || a.scalar_type() == b.scalar_type();
}

// Returns whether the kernels support this BatchNorm.
bool suits(const BatchNormGiven& norm) {
  const auto& x = norm.x;
  const bool kind = x.scalar_type() == at::kFloat || brimful::is_half(x.scalar_type());
  const bool shape = x.dim() == 2 || x.dim() == 4 || x.dim() == 5;
  if (!kind || !shape || x.numel() == 0 || !x.is_contiguous(channels_last(x))) return false;
  const bool has_running = norm.running_mean.defined() && norm.running_variance.defined();
  return (norm.training || has_running) && serves(norm.weight, x) && serves(norm.bias, x) &&
         serves(norm.running_mean, x) && serves(norm.running_variance, x) &&
         same_kind(norm.weight, norm.bias) && same_kind(norm.running_mean, norm.running_variance);
}

bool is_like(const at::Tensor& a, const at::Tensor& b) {
  return a.sizes() == b.sizes() && is_alike(a, b);
}

// Returns the tensor in channels-last format.
at::Tensor channels_laid_out(const at::Tensor& tensor) {
  return tensor.defined() ? laid_out(tensor, channels_last(tensor)) : tensor;
}

bool any_wants_gradient(const BatchNormGiven& norm) {
  return compute_requires_grad(norm.x, norm.weight, norm.bias);
}

// Returns a row of the forward's per-channel results, shaped to broadcast over x.
at::Tensor row_of(const at::Tensor& saved, int64_t row, const at::Tensor& x) {
  std::vector<int64_t> shape(x.dim(), 1);
  shape[1] = x.size(1);
  return saved.narrow(0, row * x.size(1), x.size(1)).view(shape);
}

std::vector<int64_t> all_but_channels(const at::Tensor& x) {
  std::vector<int64_t> dims = {0};
  for (int64_t d = 2; d < x.dim(); ++d) dims.push_back(d);
  return dims;
}

// Computes one BatchNorm's gradients with libtorch's operations.
BatchNormGradients::Of plain_gradients(
    const at::Tensor& dz, const BatchNormDone& norm, bool training) {
  const auto& [x, saved, weight, bias] = norm;
  const auto dims = all_but_channels(x);
  const auto mean = row_of(saved, 0, x);
  const auto deviation = row_of(saved, 1, x);
  const auto scale = row_of(saved, 2, x);
  const auto normed = (x.to(at::kFloat) - mean) * deviation;
  const auto sum = dz.sum(dims, true);
  const auto product = (dz * normed).sum(dims, true);
  auto dx = dz;
  if (training) {
    const double count = static_cast<double>(x.numel() / x.size(1));
    dx = dz - sum / count - normed * (product / count);
  }
  const auto like = [](const at::Tensor& gradient, const at::Tensor& wanted) {
    return wanted.defined() ? gradient.view({-1}).to(wanted.scalar_type()) : at::Tensor();
  };
  return {(dx * scale).to(x.scalar_type()), like(product, weight), like(sum, bias)};
}

// Unpacks the bits of a mask into ones and zeros of x's shape.
at::Tensor unpacked(const at::Tensor& mask, const at::Tensor& x) {
  const int64_t width = x.numel() / mask.numel();
  const auto bits = at::arange(width, mask.options());
  const auto all = mask.unsqueeze(1).bitwise_right_shift(bits).bitwise_and(1);
  return at::empty_like(x, x.options().dtype(at::kByte)).as_strided({x.numel()}, {1}).copy_(
      all.reshape({-1})).as_strided(x.sizes(), x.strides());
}

// Computes the gradient of a pooling's input. `places` are the positions of the maxima within their 3×3 windows,
// channels last.
at::Tensor unpooled(const at::Tensor& dy, const at::Tensor& places, const at::Tensor& x) {
  const auto shape = dy.sizes();
  const auto rows = places.view({shape[0], shape[2], shape[3], shape[1]});
  const auto place = rows.permute({0, 3, 1, 2}).to(at::kLong);
  const auto from = [&](int64_t windows) { return at::arange(windows, place.options()) * 2 - 1; };
  const auto row = from(shape[2]).unsqueeze(1) + place.div(3, "floor");
  const auto pixel = row * x.size(3) + from(shape[3]) + place.remainder(3);
  return at::max_pool2d_with_indices_backward(
      dy, x.to(dy.scalar_type()), {3, 3}, {2, 2}, {1, 1}, {1, 1}, false, pixel);
}

// Computes the same results as the kernel, for when the kernel is not available.
BatchNormGradients plain_backward(const BatchNormGradient& in) {
  const auto& x = in.own.x;
  auto dz = in.dy.to(at::kFloat);
  if (in.pooled) dz = unpooled(dz, in.mask, x);
  if (in.more_dy.defined()) dz = dz + in.more_dy;
  if (in.relu && in.mask.defined() && !in.pooled) {
    dz = dz * unpacked(in.mask, x);
  } else if (in.relu) {
    const auto row = [&](int64_t number) { return row_of(in.own.saved, number, x); };
    const auto y = (x.to(at::kFloat) - row(0)) * row(2);
    dz = at::where(y + row(3) <= 0, at::zeros({}, dz.options()), dz);
  }
  BatchNormGradients out;
  out.own = plain_gradients(dz, in.own, in.training);
  if (in.keeps_residual) out.d_residual = dz.to(x.scalar_type());
  if (in.other.x.defined()) out.other = plain_gradients(dz, in.other, in.training);
  return out;
}

BatchNormGradients gradients_of(const BatchNormGradient& in) {
  return or_else(
      "the backward of BatchNorm", [&] { return functions()->batch_norm_backward(in); },
      [&] { return plain_backward(in); });
}

// Autograd node. It has two outputs with the same values: a consumer that uses the result twice may use both, and
// the backward then adds both gradients in its own pass.
struct BatchNormNode final : KernelNode {
  // One BatchNorm: its input, the forward's per-channel results, and templates for its gradients.
  struct Saved {
    SavedVariable x;
    at::Tensor found, weight_like, bias_like;
  };

  // Edges of the node, in this order.
  enum Input { kX, kWeight, kBias, kAddend, kOtherWeight, kOtherBias };

  std::string name() const override { return "BrimfulBatchNormBackward"; }

  const char* what() const override { return "BatchNorm"; }

  void let_go() override {
    for (auto* norm : {&own, &other}) {
      norm->x.reset_data();
      norm->found.reset();
    }
    known.mask.reset();
  }

  variable_list backward(variable_list&& gradients) override {
    at::Tensor dy = gradients[0];
    at::Tensor more_dy = gradients[1];
    if (!dy.defined()) std::swap(dy, more_dy);
    if (!dy.defined()) return variable_list(num_outputs());
    // A pooling's gradient is gathered from a single tensor.
    if (known.pooled && more_dy.defined()) dy = dy + std::exchange(more_dy, {});
    const auto all = gradients_of(gradient(channels_laid_out(dy), channels_laid_out(more_dy)));
    const auto& of_addend = other.found.defined() ? all.other.dx : all.d_residual;
    return {all.own.dx, all.own.d_weight,   all.own.d_bias,
            of_addend,  all.other.d_weight, all.other.d_bias};
  }

  BatchNormDone done_of(const Saved& norm, Input weight, Input bias) {
    const auto if_wanted = [&](const at::Tensor& like, Input input) {
      return task_should_compute_output(input) ? like : at::Tensor();
    };
    return {
        norm.x.unpack(shared_from_this()), norm.found, if_wanted(norm.weight_like, weight),
        if_wanted(norm.bias_like, bias)};
  }

  BatchNormGradient gradient(at::Tensor dy, at::Tensor more_dy) {
    BatchNormGradient in = known;
    in.dy = std::move(dy);
    in.more_dy = std::move(more_dy);
    in.own = done_of(own, kWeight, kBias);
    if (other.found.defined()) {
      in.other = done_of(other, kOtherWeight, kOtherBias);
    } else {
      in.keeps_residual = task_should_compute_output(kAddend);
    }
    return in;
  }

  Saved own, other;
  // Parts of the backward's arguments known in advance: the mask and the layer's configuration.
  BatchNormGradient known{};
};

BatchNormNode::Saved saved_of(const BatchNormGiven& norm, at::Tensor found) {
  // The parameter is kept for its dtype, shape and device.
  const auto like_of = [](const at::Tensor& parameter) {
    return parameter.defined() ? parameter.detach() : at::Tensor();
  };
  return {
      SavedVariable(norm.x, false), std::move(found), like_of(norm.weight), like_of(norm.bias)};
}

// Second addend: another BatchNorm, a tensor, or nothing.
struct Beside {
  at::Tensor tensor = {};
  // Has no x if the addend is not a BatchNorm.
  BatchNormGiven norm = {};
  at::Tensor saved = {};

  bool is_norm() const { return norm.x.defined(); }
  const at::Tensor& input() const { return is_norm() ? norm.x : tensor; }
};

// Attaches the node to y.
void attach(
    const at::Tensor& y, const BatchNormGiven& norm, const Beside& beside, BatchNormed&& out, bool relu,
    bool pooled) {
  const auto node = node_after<BatchNormNode>(
      norm.x, norm.weight, norm.bias, beside.input(), beside.norm.weight, beside.norm.bias);
  node->own = saved_of(norm, std::move(out.saved));
  node->known.mask = std::move(out.mask);
  node->known.training = norm.training;
  node->known.relu = relu;
  node->known.pooled = pooled;
  if (beside.is_norm()) node->other = saved_of(beside.norm, beside.saved);
  // The output for a second use is a view, which libtorch requires to come first.
  node->add_input_metadata(y);
  torch::autograd::set_history(y, node);
}

void tell_of(const char* name, const BatchNormGiven& norm) {
  brimful::report(
      name,
      {double(norm.training), norm.momentum, norm.eps}, {&norm.x, &norm.weight, &norm.bias},
      {&norm.running_mean, &norm.running_variance});
}

// Forgets the running statistics after their update: a fallback must not update them again.
void leave_running(BatchNormGiven& norm) {
  norm.running_mean.reset();
  norm.running_variance.reset();
}

at::Tensor by_kernels(
    const BrimfulCudaFunctions& functions, const BatchNormGiven& norm, Beside& beside, bool relu) {
  const bool graph = any_wants_gradient(norm) || any_wants_gradient(beside.norm) ||
                     compute_requires_grad(beside.tensor);
  BatchNormed out;
  {
    const at::NoGradGuard untracked;
    Addend addend;
    if (beside.is_norm()) {
      tell_of("brimful::batch_norm_statistics", beside.norm);
      beside.saved = functions.batch_norm_statistics(beside.norm);
      leave_running(beside.norm);
      addend = {beside.norm.x, beside.saved};
    } else if (beside.tensor.defined()) {
      addend.tensor = channels_laid_out(beside.tensor);
    }
    tell_of("brimful::batch_norm", norm);
    brimful::report("brimful::relu", {double(relu)}, {&beside.tensor}, {});
    out = functions.batch_norm_forward(norm, addend, relu, graph);
  }
  at::Tensor y = out.y;
  if (graph) attach(y, norm, beside, std::move(out), relu, false);
  return y;
}

// Returns the per-channel values that the forward's kernel would store, from the running statistics.
at::Tensor saved_of_running(const BatchNormGiven& norm) {
  const auto mean = norm.running_mean.to(at::kFloat);
  const auto deviation = norm.running_variance.to(at::kFloat).add(norm.eps).rsqrt();
  const auto scale = norm.weight.defined() ? norm.weight.to(at::kFloat) * deviation : deviation;
  const auto bias = norm.bias.defined() ? norm.bias.to(at::kFloat) : at::zeros_like(mean);
  return at::cat({mean, deviation, scale, bias});
}

at::Tensor pooled_by_kernels(const BrimfulCudaFunctions& functions, BatchNormGiven& norm) {
  BatchNormed out;
  {
    const at::NoGradGuard untracked;
    tell_of("brimful::batch_norm_pool", norm);
    const auto saved =
        norm.training ? functions.batch_norm_statistics(norm) : saved_of_running(norm);
    if (norm.training) leave_running(norm);
    out = functions.batch_norm_pool(norm.x, saved);
  }
  at::Tensor y = out.y;
  if (any_wants_gradient(norm)) attach(y, norm, {}, std::move(out), true, true);
  return y;
}

at::Tensor by_libtorch(const BatchNormGiven& norm) {
  return at::batch_norm(
      norm.x, norm.weight, norm.bias, norm.running_mean, norm.running_variance, norm.training,
      norm.momentum, norm.eps, true);
}

// Adds and applies ReLU in place: no other operation reads the normalised values, which are as large as the input.
at::Tensor by_libtorch(const BatchNormGiven& norm, const Beside& beside, bool relu) {
  at::Tensor y = by_libtorch(norm);
  if (beside.is_norm()) y.add_(by_libtorch(beside.norm));
  if (beside.tensor.defined()) y.add_(beside.tensor);
  return relu ? y.relu_() : y;
}

bool suits(const BatchNormGiven& norm, const Beside& beside) {
  if (!suits(norm) || (beside.is_norm() && !suits(beside.norm))) return false;
  return !beside.input().defined() || is_like(norm.x, beside.input());
}

// Runs the kernels if they are available and `suited`, else libtorch.
template <class Own, class Libtorch>
auto if_possible(const at::Tensor& x, bool suited, Own&& own, Libtorch&& libtorch)
    -> decltype(libtorch()) {
  const auto* functions = suited ? functions_for(x) : nullptr;
  if (functions == nullptr) return libtorch();
  return or_else("BatchNorm", [&] { return own(*functions); }, libtorch);
}

// Returns the mean and the variance of each channel.
std::tuple<at::Tensor, at::Tensor> moments(const at::Tensor& x) {
  const at::NoGradGuard untracked;
  const auto libtorch = [&] { return at::batch_norm_update_stats(x, {}, {}, 0.0); };
  BatchNormGiven norm{};
  norm.x = x;
  norm.training = true;
  const auto own = [&](const auto& functions) {
    brimful::report("brimful::batch_norm_moments", {}, {&x}, {});
    return functions.batch_norm_moments(x);
  };
  return if_possible(x, suits(norm), own, libtorch);
}

at::Tensor batch_norm(const BatchNormGiven& norm, Beside beside, bool relu) {
  // The fused pair is for training, in which both have statistics to compute.
  if (beside.is_norm() && !(norm.training && beside.norm.training)) {
    beside.tensor = batch_norm(beside.norm, {}, false);
    beside.norm = {};
  }
  return if_possible(
      norm.x, suits(norm, beside),
      [&](const auto& functions) { return by_kernels(functions, norm, beside, relu); },
      [&] { return by_libtorch(norm, beside, relu); });
}

}  // namespace

extern "C" {

// Adds a tensor or the output of another BatchNorm before the ReLU; both are null for no addition.
int32_t brimful_batch_norm(
    const BrimfulNorm* raw, const at::Tensor* added, const BrimfulNorm* added_norm, bool relu,
    at::Tensor** out, char** message) noexcept {
  return guarded(message, [&] {
    Beside beside{or_none(added)};
    if (added_norm != nullptr) {
      beside.norm = norm_of(*added_norm);
      TORCH_CHECK(beside.is_norm(), "the second BatchNorm has no input");
    }
    *out = new at::Tensor(batch_norm(norm_of(*raw), std::move(beside), relu));
  });
}

// Applies ReLU and a max pooling of 3×3, stride 2, padding 1 to the result.
int32_t brimful_batch_norm_pool(
    const BrimfulNorm* raw, at::Tensor** out, char** message) noexcept {
  return guarded(message, [&] {
    BatchNormGiven norm = norm_of(*raw);
    // Checks the backward's index range before the running statistics change.
    const bool suited =
        norm.x.dim() == 4 && suits(norm) && squares_of(norm.x) < int64_t{1} << 28;
    *out = new at::Tensor(if_possible(
        norm.x, suited,
        [&](const auto& functions) { return pooled_by_kernels(functions, norm); },
        [&] { return at::max_pool2d(by_libtorch(norm).relu_(), {3, 3}, {2, 2}, {1, 1}); }));
  });
}

// Returns each channel's mean and variance over all other dimensions.
int32_t brimful_batch_norm_moments(
    const at::Tensor* x, at::Tensor** out, char** message) noexcept {
  return guarded(message, [&] {
    const auto [mean, variance] = moments(*x);
    out[0] = new at::Tensor(mean);
    out[1] = new at::Tensor(variance);
  });
}

// Returns a handle to the same values for a second consumer. If the tensor is an output of this file's node, the
// node's backward adds the gradients of both uses in its own pass. Otherwise, returns the tensor itself.
int32_t brimful_second_use(const at::Tensor* tensor, at::Tensor** out, char** message) noexcept {
  return guarded(message, [&] {
    const auto edge = torch::autograd::impl::gradient_edge(*tensor);
    const bool ours = dynamic_cast<BatchNormNode*>(edge.function.get()) != nullptr;
    at::Tensor second = *tensor;
    if (ours && edge.input_nr == 1 && at::GradMode::is_enabled()) {
      // A view: if either tensor is changed in place, libtorch gives the other a new history.
      second = tensor->alias();
      torch::autograd::impl::set_gradient_edge(second, {edge.function, 0});
    }
    *out = new at::Tensor(second);
  });
}

}  // extern "C"
