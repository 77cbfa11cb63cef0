// libtorch's fused optimizers: the update of many parameters in one pass over their memory.
//
// The CPU kernels walk raw memory by the parameter's number of elements, so nothing that differs
// from the parameter in shape, layout, kind or device may reach them; and what they are given must
// look contiguous, or they copy the gradient into another order than the parameter's.

#include "guard.h"
#include "mirrored.h"
#include "tensors.h"
#include "version.h"

#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_fused_adam.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/_fused_sgd.h>
#include <ATen/ops/as_strided.h>

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

// The same memory in the order in which it lies, so that channels-last looks contiguous too.
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

// A CUDA kernel reads the rate where it lies, whatever that is.
void check_rate(const at::Tensor* rate, const at::Tensor& parameter) {
  if (rate == nullptr) return;
  TORCH_CHECK(
      rate->dim() == 0 && rate->scalar_type() == at::kFloat &&
          rate->device() == parameter.device(),
      "a learning rate must be one f32 on the parameters' device, but is ", rate->toString(),
      rate->sizes(), " on ", rate->device());
}

// Without an allocation, so that nothing can fail between the counters and the update. A CPU's
// `add_` allocates for the number that it adds.
void advance(const std::vector<at::Tensor>& steps) {
  if (!steps.front().is_cpu()) {
    at::_foreach_add_(steps, 1.0);
    return;
  }
  for (const auto& step : steps) *step.data_ptr<float>() += 1.0F;
}

// libtorch does not count what the fused kernels do as changes of the parameters. Autograd goes by
// that, and so does whoever keeps copies of them.
void count_changes(const at::Tensor* const* parameters, size_t count) {
  for (size_t i = 0; i < count; ++i) brimful::count_change(*parameters[i]);
}

}  // namespace

extern "C" {

bool brimful_fits(const at::Tensor* parameter, const at::Tensor* other) noexcept {
  return fits(*parameter, *other);
}

// Null buffers: no momentum. A null `rate`: the number in the options.
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
    // Plain descent is one addition, for which the CPU's fused kernel starts its threads for the
    // smallest tensor too.
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

// Null maxima: no amsgrad. A null `rate`: the number in the options.
int32_t brimful_fused_adam(
    const at::Tensor* const* parameters, const at::Tensor* const* gradients,
    const at::Tensor* const* averages, const at::Tensor* const* squares,
    const at::Tensor* const* maxima, const at::Tensor* const* steps, size_t count,
    const BrimfulAdam* options, const at::Tensor* rate, char** message) noexcept {
  return guarded(message, [&] {
    if (count == 0) return;
    const at::NoGradGuard no_grad;
    const auto to = flat_list(parameters, parameters, count, "parameter");
    const auto by = flat_list(gradients, parameters, count, "gradient");
    const auto first = flat_list(averages, parameters, count, "average");
    const auto second = flat_list(squares, parameters, count, "average of squares");
    const auto most = maxima == nullptr
                          ? std::vector<at::Tensor>()
                          : flat_list(maxima, parameters, count, "maximum of squares");
    const auto counters = step_list(steps, parameters, count);
    check_rate(rate, *parameters[0]);
    const auto& o = *options;
    const auto update = [&](const auto& learning_rate) {
      const auto fused = [&](auto&& kernel) {
        kernel(
            to, by, first, second, most, counters, learning_rate, o.beta1, o.beta2, o.weight_decay,
            o.eps, o.amsgrad, /*maximize=*/false, std::nullopt, std::nullopt);
      };
      o.decoupled ? fused([](auto&&... a) { at::_fused_adamw_(a...); })
                  : fused([](auto&&... a) { at::_fused_adam_(a...); });
    };
    count_changes(parameters, count);
    advance(counters);
    rate == nullptr ? update(o.learning_rate) : update(*rate);
  });
}

}  // extern "C"
