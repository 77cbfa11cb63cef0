// Tensors as kernels of our own take them, and what to do where one cannot be had.
#pragma once

#include "kernels.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <cstdint>
#include <optional>
#include <string>

namespace brimful::kernels {

inline NumberKind number_kind(const at::Tensor& tensor) {
  const auto kind = tensor.scalar_type();
  return kind == at::kBFloat16 ? NumberKind::kBf16
         : kind == at::kHalf   ? NumberKind::kF16
                               : NumberKind::kF32;
}

// Whether kernels may work on such a tensor: they are there, and know its kind.
inline bool takes(const at::Tensor& tensor) {
  const auto kind = tensor.scalar_type();
  const bool known = kind == at::kFloat || kind == at::kBFloat16 || kind == at::kHalf;
  return known && functions_for(tensor) != nullptr;
}

inline bool is_alike(const at::Tensor& a, const at::Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.device() == b.device();
}

// The same numbers one after the other, from a multiple of 16 bytes on. Detaching is an operation of
// libtorch's, so that those who list what is read hear of the tensor: they do not see kernels.
inline at::Tensor plain(const at::Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  const auto dense = tensor.detach().contiguous();
  const bool aligned = reinterpret_cast<uintptr_t>(dense.const_data_ptr()) % 16 == 0;
  return aligned ? dense : dense.clone();
}

inline const void* pointer_or_null(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.const_data_ptr() : nullptr;
}

// The sums of columns of f32 numbers, on the current device, in another kind. Throws a KernelError.
inline at::Tensor column_sums(const at::Tensor& from, at::ScalarType kind) {
  auto into = at::empty({from.size(1)}, from.options().dtype(kind));
  functions()->column_sums(
      {from.const_data_ptr<float>(), into.mutable_data_ptr(), static_cast<int>(number_kind(into)),
       static_cast<int>(from.size(0)), static_cast<int>(from.size(1))});
  return into;
}

// The second where the first throws a KernelError.
template <class Kernel, class Libtorch>
void or_else(Kernel&& kernel, Libtorch&& libtorch) {
  try {
    kernel();
  } catch (const KernelError& error) {
    refused(error.what());
    libtorch();
  }
}

// As a node takes a tensor that may be missing: a defined one gets an edge, another does not.
inline std::optional<at::Tensor> optional(const at::Tensor& tensor) {
  return tensor.defined() ? std::make_optional(tensor) : std::nullopt;
}

inline void refuse_second_gradient(const char* what) {
  TORCH_CHECK(
      !at::GradMode::is_enabled(), "the gradient of ", what,
      " by kernels of our own has no gradient of its own: switch them off (BRIMFUL_KERNELS=off) where "
      "a loss is differentiated twice");
}

}  // namespace brimful::kernels
