// Tensors as kernels of our own take them, and what to do where one cannot be had.
#pragma once

#include "kernels.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <c10/core/DeviceGuard.h>

#include <string>

namespace brimful::kernels {

// Whether kernels may work on such a tensor: they are there, and know its kind.
inline bool takes(const at::Tensor& tensor) {
  const auto kind = tensor.scalar_type();
  const bool known = kind == at::kFloat || kind == at::kBFloat16 || kind == at::kHalf;
  return known && functions_for(tensor) != nullptr;
}

// While kernels work on the device of a tensor: autograd sees nothing of it.
struct OwnWork {
  explicit OwnWork(const at::Tensor& on) : there(on.device()) {}
  const at::AutoDispatchBelowADInplaceOrView untracked;
  const c10::DeviceGuard there;
};

// Whether the other one, if there is one, is of the same kind and device.
inline bool is_alike(const at::Tensor& tensor, const at::Tensor& other) {
  return !other.defined() ||
         (tensor.scalar_type() == other.scalar_type() && tensor.device() == other.device());
}

// The same numbers in this order without gaps, from a multiple of 16 bytes on.
inline at::Tensor laid_out(
    const at::Tensor& tensor, at::MemoryFormat format = at::MemoryFormat::Contiguous) {
  if (!tensor.defined()) return tensor;
  const auto dense = tensor.contiguous(format);
  return is_aligned(dense) ? dense : dense.clone(format);
}

inline const void* pointer_or_null(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.const_data_ptr() : nullptr;
}

// The second where the first throws a KernelError, which is kept with the name of what it was for.
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
