// Kinds of numbers, as kernels/prelude.cuh has them, and the words that they are read in.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace brimful::kernels {

enum NumberKind : int { kF32 = 0, kBf16 = 1, kF16 = 2 };

// Their names, in their order.
inline constexpr const char* kNumberKinds[] = {"F32", "Bf16", "F16"};

inline int bytes_of(NumberKind kind) { return kind == NumberKind::kF32 ? 4 : 2; }

// How many a thread reads at once, in 16 bytes.
inline int numbers_a_word(NumberKind kind) { return 16 / bytes_of(kind); }

// Of a tensor of one of these kinds; f32 where there is none.
inline NumberKind number_kind(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.scalar_type() == at::kFloat) return NumberKind::kF32;
  return tensor.scalar_type() == at::kBFloat16 ? NumberKind::kBf16 : NumberKind::kF16;
}

// Whether it begins at a multiple of 16 bytes, as words do; so does one that is not there.
inline bool is_aligned(const at::Tensor& tensor) {
  return !tensor.defined() || reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % 16 == 0;
}

}  // namespace brimful::kernels
