// Dtypes, as in kernels/prelude.cuh, and the words that they are read in.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace brimful::kernels {

enum NumberKind : int { kF32 = 0, kBf16 = 1, kF16 = 2 };

// Names, in the order of NumberKind.
inline constexpr const char* kNumberKinds[] = {"F32", "Bf16", "F16"};

inline int bytes_of(NumberKind kind) { return kind == NumberKind::kF32 ? 4 : 2; }

// Returns how many numbers a thread reads at once, in 16 bytes.
inline int numbers_a_word(NumberKind kind) { return 16 / bytes_of(kind); }

// Returns the dtype of a tensor; f32 if it is undefined.
inline NumberKind number_kind(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.scalar_type() == at::kFloat) return NumberKind::kF32;
  return tensor.scalar_type() == at::kBFloat16 ? NumberKind::kBf16 : NumberKind::kF16;
}

// Returns whether the tensor begins at a multiple of 16 bytes, as words do; true if it is undefined.
inline bool is_aligned(const at::Tensor& tensor) {
  return !tensor.defined() || reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % 16 == 0;
}

}  // namespace brimful::kernels
