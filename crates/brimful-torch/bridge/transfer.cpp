// Copies between host and device that do not block the host.

#include "device.h"
#include "guard.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

using brimful::device_of;
using brimful::guarded;

extern "C" {

int32_t brimful_pin(const at::Tensor* tensor, at::Tensor** out, char** message) noexcept {
  return guarded(message, [&] { *out = new at::Tensor(tensor->pin_memory()); });
}

// Allocates host memory of the tensor's shape and dtype: contiguous, or channels last if the tensor is and
// `keeps_order` is set.
int32_t brimful_empty_pinned(
    const at::Tensor* tensor, bool pinned, bool keeps_order, at::Tensor** out,
    char** message) noexcept {
  return guarded(message, [&] {
    const auto options = at::device(at::kCPU).dtype(tensor->dtype()).pinned_memory(pinned);
    const auto format =
        keeps_order ? tensor->suggest_memory_format() : at::MemoryFormat::Contiguous;
    *out = new at::Tensor(at::empty(tensor->sizes(), options, format));
  });
}

int32_t brimful_copy(at::Tensor* into, const at::Tensor* from, char** message) noexcept {
  return guarded(message, [&] {
    const at::NoGradGuard no_grad;
    into->copy_(*from, /*non_blocking=*/true);
  });
}

int32_t brimful_send(
    const at::Tensor* tensor, int32_t device, at::Tensor** out, char** message) noexcept {
  return guarded(message, [&] {
    const auto to = device_of(device);
    // Host code does not wait for a stream before it reads a tensor: the copy must be complete.
    *out = new at::Tensor(tensor->to(to, tensor->scalar_type(), /*non_blocking=*/!to.is_cpu()));
  });
}

}  // extern "C"
