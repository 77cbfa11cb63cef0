// A product of halves by cuBLAS, times a number that is on the device.
#pragma once

#include "number_kind.h"

#include <cstdint>

namespace brimful::kernels {

// out [rows × columns] += factor · aᵀ · b, where rows of `a` and `b` begin so many elements apart.
struct ScaledProduct {
  const void* a;  // inner × rows
  const void* b;  // inner × columns
  float* out;     // dense
  const float* factor;  // on the device, as all others
  const float* one;     // what it says, for cuBLAS to read
  int64_t rows;
  int64_t columns;
  int64_t inner;
  int64_t a_step;
  int64_t b_step;
};

// On the current stream of the current device. Throws a KernelError where it cannot be had.
void add_scaled_product(const ScaledProduct& product, NumberKind kind);

}  // namespace brimful::kernels
