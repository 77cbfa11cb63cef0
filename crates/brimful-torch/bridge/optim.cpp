// Fused optimizers of libtorch: update many parameters in one pass over their memory.
//
// The CPU kernels walk raw memory for the parameter's number of elements, so no tensor that differs from the
// parameter in shape, memory format, dtype or device may reach them. Their arguments must also appear contiguous,
// or they copy the gradient into another order than the parameter's.

#include "guard.h"
#include "host_adam.h"
#include "mirrored.h"
#include "tensors.h"
#include "version.h"

#include <ATen/TensorIterator.h>
#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_fused_adam.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/_fused_sgd.h>
#include <ATen/ops/as_strided.h>
#include <ATen/ops/linspace.h>

#include <cmath>

using brimful::guarded;
using brimful::list_of;

BRIMFUL_READ_AGAIN(
    "the fused CPU kernels: that they walk raw memory, allocate nothing and raise no version");

namespace {

bool fits(const at::Tensor& parameter, const at::Tensor& other) {
  return parameter.layout() == at::kStrided && other.layout() == at::kStrided &&
         parameter.is_non_overlapping_and_dense() &&
         parameter.scalar_type() == other.scalar_type() && parameter.device() == other.device() &&
         parameter.sizes() == other.sizes() && parameter.strides() == other.strides();
}

// Returns a flat view in memory order, so that channels-last tensors appear contiguous.
at::Tensor in_memory_order(const at::Tensor& tensor) {
  return tensor.is_contiguous() ? tensor : tensor.as_strided({tensor.numel()}, {1});
}

std::vector<at::Tensor> flat_list(
    const at::Tensor* const* tensors, const at::Tensor* const* parameters, size_t count,
    const char* what) {
  std::vector<at::Tensor> list;
  list.reserve(count);
  for (size_t i = 0; i < count; ++i) {
    TORCH_CHECK(
        fits(*parameters[i], *tensors[i]), what, " ", i, " (", tensors[i]->toString(),
        tensors[i]->sizes(), ", strides ", tensors[i]->strides(),
        ") is not laid out as its parameter (", parameters[i]->toString(), parameters[i]->sizes(),
        ", strides ", parameters[i]->strides(), "), or that is not dense");
    list.push_back(in_memory_order(*tensors[i]));
  }
  return list;
}

std::vector<at::Tensor> step_list(
    const at::Tensor* const* steps, const at::Tensor* const* parameters, size_t count) {
  auto list = list_of(steps, count);
  for (size_t i = 0; i < count; ++i) {
    TORCH_CHECK(
        list[i].dim() == 0 && list[i].scalar_type() == at::kFloat &&
            list[i].device() == parameters[i]->device(),
        "step counter ", i, " must be one f32 on its parameter's device");
  }
  return list;
}

// A CUDA kernel reads the rate at its address without any check.
void check_rate(const at::Tensor* rate, const at::Tensor& parameter) {
  if (rate == nullptr) return;
  TORCH_CHECK(
      rate->dim() == 0 && rate->scalar_type() == at::kFloat &&
          rate->device() == parameter.device(),
      "a learning rate must be one f32 on the parameters' device, but is ", rate->toString(),
      rate->sizes(), " on ", rate->device());
}

// Increments the counters without allocating, so that nothing can fail between them and the update. A CPU's
// `add_` allocates a tensor for its number.
void advance(const std::vector<at::Tensor>& steps) {
  if (!steps.front().is_cpu()) {
    at::_foreach_add_(steps, 1.0);
    return;
  }
  for (const auto& step : steps) *step.data_ptr<float>() += 1.0F;
}

// libtorch does not increment the parameters' versions in its fused kernels. Autograd, and any code that caches
// copies of parameters, relies on them.
void count_changes(const at::Tensor* const* parameters, size_t count) {
  for (size_t i = 0; i < count; ++i) brimful::count_change(*parameters[i]);
}

// Parameters, gradients and Adam's state in memory order, as parallel lists.
struct AdamLists {
  std::vector<at::Tensor> to, by, averages, squares, maxima, steps;
};

template <typename Rate>
void fused_adam(const AdamLists& l, const BrimfulAdam& o, const Rate& rate) {
  const auto fused = [&](auto&& kernel) {
    kernel(
        l.to, l.by, l.averages, l.squares, l.maxima, l.steps, rate, o.beta1, o.beta2,
        o.weight_decay, o.eps, o.amsgrad, /*maximize=*/false, std::nullopt, std::nullopt);
  };
  o.decoupled ? fused([](auto&&... a) { at::_fused_adamw_(a...); })
              : fused([](auto&&... a) { at::_fused_adam_(a...); });
}

// One parameter with its Adam state, in memory order.
struct AdamTensors {
  at::Tensor parameter, average, square;
};

// Computes Adam's next values out of place for this step number, on this thread's share of cores.
void compute_beside(
    const AdamTensors& now, const at::Tensor& gradient, const AdamTensors& next,
    const BrimfulAdam& o, double step) {
  const double rate = o.learning_rate;
  const brimful::HostAdam adam{
      static_cast<float>(o.decoupled ? 0 : o.weight_decay),
      static_cast<float>(o.decoupled ? 1 - rate * o.weight_decay : 1),
      static_cast<float>(1 - o.beta1),
      static_cast<float>(1 - o.beta2),
      static_cast<float>(o.beta2),
      static_cast<float>(std::sqrt(1 - std::pow(o.beta2, step))),
      static_cast<float>(o.eps),
      static_cast<float>(rate / (1 - std::pow(o.beta1, step)))};
  auto over = at::TensorIteratorConfig()
                  .set_check_mem_overlap(false)
                  .resize_outputs(false)
                  .add_output(next.parameter)
                  .add_output(next.average)
                  .add_output(next.square)
                  .add_const_input(now.parameter)
                  .add_const_input(gradient)
                  .add_const_input(now.average)
                  .add_const_input(now.square)
                  .build();
  // All tensors are contiguous; each thread gets one range.
  over.for_each([&](char** data, const int64_t* /*strides*/, int64_t length, int64_t rows) {
    const int64_t count = length * rows;
    const auto to = [&](int at) { return reinterpret_cast<float*>(data[at]); };
    const auto from = [&](int at) { return reinterpret_cast<const float*>(data[at]); };
    brimful::host_adam(
        {from(3), from(5), from(6)}, from(4), {to(0), to(1), to(2)}, count, adam);
  });
}

// Returns whether the results equal libtorch's to the last bit. libtorch's rounding depends on how it was
// compiled for this machine, and a step must not depend on when it is computed.
bool is_beside_the_same(bool decoupled) {
  constexpr int64_t kNumbers = 1 << 12;
  const auto numbers = [](double from, double to) {
    return at::linspace(from, to, kNumbers, at::kDouble).sin().to(at::kFloat);
  };
  const AdamTensors now{numbers(0, 99), numbers(5, 77), numbers(1, 60).abs()};
  const AdamTensors next{now.parameter.clone(), now.average.clone(), now.square.clone()};
  const auto gradient = numbers(2, 55);
  const auto steps = at::linspace(3, 3, 1, at::kFloat).squeeze();
  const BrimfulAdam o{1e-2, 0.9, 0.999, 1e-8, 0.1, /*amsgrad=*/false, decoupled};
  compute_beside(now, gradient, next, o, steps.item<double>());
  fused_adam(
      {{now.parameter}, {gradient}, {now.average}, {now.square}, {}, {steps}}, o, o.learning_rate);
  return now.parameter.equal(next.parameter) && now.average.equal(next.average) &&
         now.square.equal(next.square);
}

bool can_compute_beside(const BrimfulAdam& o, const at::Tensor& parameter) {
  // From 0.5 on, libtorch uses the other form of its interpolation.
  const bool is_small = static_cast<float>(1 - o.beta1) < 0.5F;
  if (!parameter.is_cpu() || parameter.scalar_type() != at::kFloat || !is_small) return false;
  static const bool decoupled = is_beside_the_same(true);
  static const bool coupled = is_beside_the_same(false);
  return o.decoupled ? decoupled : coupled;
}

}  // namespace

extern "C" {

bool brimful_fits(const at::Tensor* parameter, const at::Tensor* other) noexcept {
  return fits(*parameter, *other);
}

// Null buffers mean no momentum. A null `rate` means the number in the options.
int32_t brimful_fused_sgd(
    const at::Tensor* const* parameters, const at::Tensor* const* gradients,
    const at::Tensor* const* buffers, size_t count, const BrimfulSgd* options,
    const at::Tensor* rate, char** message) noexcept {
  return guarded(message, [&] {
    if (count == 0) return;
    const at::NoGradGuard no_grad;
    const auto to = flat_list(parameters, parameters, count, "parameter");
    const auto by = flat_list(gradients, parameters, count, "gradient");
    check_rate(rate, *parameters[0]);
    TORCH_CHECK(
        buffers != nullptr || options->momentum == 0, "a momentum of ", options->momentum,
        " needs buffers");
    const auto held = buffers == nullptr
                          ? std::vector<at::Tensor>()
                          : flat_list(buffers, parameters, count, "momentum buffer");
    const auto& o = *options;
    // Plain SGD is one addition; the CPU's fused kernel would start its threads even for the smallest tensor.
    count_changes(parameters, count);
    if (to[0].is_cpu() && o.momentum == 0 && o.weight_decay == 0 && rate == nullptr) {
      return at::_foreach_add_(to, by, -o.learning_rate);
    }
    const auto update = [&](const auto& learning_rate) {
      at::_fused_sgd_(
          to, by, held, o.weight_decay, o.momentum, learning_rate, o.dampening, o.nesterov,
          /*maximize=*/false, o.first);
    };
    rate == nullptr ? update(o.learning_rate) : update(*rate);
  });
}

// Null maxima mean no amsgrad. A null `rate` means the number in the options.
int32_t brimful_fused_adam(
    const at::Tensor* const* parameters, const at::Tensor* const* gradients,
    const at::Tensor* const* averages, const at::Tensor* const* squares,
    const at::Tensor* const* maxima, const at::Tensor* const* steps, size_t count,
    const BrimfulAdam* options, const at::Tensor* rate, char** message) noexcept {
  return guarded(message, [&] {
    if (count == 0) return;
    const at::NoGradGuard no_grad;
    AdamLists lists{
        flat_list(parameters, parameters, count, "parameter"),
        flat_list(gradients, parameters, count, "gradient"),
        flat_list(averages, parameters, count, "average"),
        flat_list(squares, parameters, count, "average of squares"),
        {},
        step_list(steps, parameters, count)};
    if (maxima != nullptr) {
      lists.maxima = flat_list(maxima, parameters, count, "maximum of squares");
    }
    check_rate(rate, *parameters[0]);
    count_changes(parameters, count);
    advance(lists.steps);
    rate == nullptr ? fused_adam(lists, *options, options->learning_rate)
                    : fused_adam(lists, *options, *rate);
  });
}

// Computes one parameter's next values out of place, from `now` (parameter, average, average of squares) into
// `next`, for this step number; sets `done` to whether that is possible.
int32_t brimful_adam_beside(
    const at::Tensor* const* now, const at::Tensor* gradient, const at::Tensor* const* next,
    const BrimfulAdam* options, double step, bool* done, char** message) noexcept {
  return guarded(message, [&] {
    const at::NoGradGuard no_grad;
    const at::Tensor* const parameters[] = {now[0], now[0], now[0]};
    const auto from = flat_list(now, parameters, 3, "present tensor");
    const auto to = flat_list(next, parameters, 3, "next tensor");
    const auto by = flat_list(&gradient, parameters, 1, "gradient");
    *done = !options->amsgrad && can_compute_beside(*options, *now[0]);
    if (*done) {
      compute_beside({from[0], from[1], from[2]}, by[0], {to[0], to[1], to[2]}, *options, step);
    }
  });
}

}  // extern "C"
