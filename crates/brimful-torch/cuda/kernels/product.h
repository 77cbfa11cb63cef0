// Half-precision product by cuBLAS, scaled by a number on the device.
#pragma once

#include "number_kind.h"

#include <cstdint>

namespace brimful::kernels {

// out [rows × columns] += factor · aᵀ · b; rows of `a` and `b` are `a_step` and `b_step` elements apart.
struct ScaledProduct {
  const void* a;  // inner × rows
  const void* b;  // inner × columns
  float* out;     // dense
  const float* factor;  // on the device, as all pointers
  const float* one;     // the number 1, for cuBLAS to read
  int64_t rows;
  int64_t columns;
  int64_t inner;
  int64_t a_step;
  int64_t b_step;
};

// Runs on the current stream of the current device. Throws a KernelError if cuBLAS cannot compute the product.
void add_scaled_product(const ScaledProduct& product, NumberKind kind);

}  // namespace brimful::kernels
