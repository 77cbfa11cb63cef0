// Preparation of tensors for custom kernels, and fallback when a kernel is not available.
#pragma once

#include "kernels.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <c10/core/DeviceGuard.h>

#include <string>

namespace brimful::kernels {

// Returns whether kernels accept this tensor: they are available and support its dtype.
inline bool takes(const at::Tensor& tensor) {
  const auto kind = tensor.scalar_type();
  const bool known = kind == at::kFloat || kind == at::kBFloat16 || kind == at::kHalf;
  return known && functions_for(tensor) != nullptr;
}

// Scope in which kernels run on a tensor's device, invisible to autograd.
struct OwnWork {
  explicit OwnWork(const at::Tensor& on) : there(on.device()) {}
  const at::AutoDispatchBelowADInplaceOrView untracked;
  const c10::DeviceGuard there;
};

// Returns whether the other tensor, if any, has the same dtype and device.
inline bool is_alike(const at::Tensor& tensor, const at::Tensor& other) {
  return !other.defined() ||
         (tensor.scalar_type() == other.scalar_type() && tensor.device() == other.device());
}

// Returns the tensor dense in this memory format and aligned to 16 bytes.
inline at::Tensor laid_out(
    const at::Tensor& tensor, at::MemoryFormat format = at::MemoryFormat::Contiguous) {
  if (!tensor.defined()) return tensor;
  const auto dense = tensor.contiguous(format);
  return is_aligned(dense) ? dense : dense.clone(format);
}

inline const void* pointer_or_null(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.const_data_ptr() : nullptr;
}

// Runs `kernel`; if it throws a KernelError, records the reason under `what` and runs `libtorch`.
template <class Kernel, class Libtorch>
auto or_else(const char* what, Kernel&& kernel, Libtorch&& libtorch) -> decltype(libtorch()) {
  try {
    return kernel();
  } catch (const KernelError& error) {
    refused(what + std::string(": ") + error.what());
  }
  return libtorch();
}

}  // namespace brimful::kernels
