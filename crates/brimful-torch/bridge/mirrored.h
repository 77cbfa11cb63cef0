// Structs that src/ffi.rs mirrors. Both sides assert the offset of each field, so that neither can change alone.
#pragma once

#include "../kernels/update_arguments.h"

#include <cstddef>
#include <cstdint>

// Asserts a field's byte offset, as src/ffi.rs does.
#define BRIMFUL_FIELD(type, field, offset) \
  static_assert(offsetof(type, field) == (offset), #type "." #field " is elsewhere in src/ffi.rs")
#define BRIMFUL_SIZE(type, size) \
  static_assert(sizeof(type) == (size), #type " is of another size in src/ffi.rs")

namespace at {
class Tensor;
}

extern "C" {

// A parameter with its gradient and state; absent tensors are null. Scales are those of 8-bit moments.
struct BrimfulUpdate {
  const at::Tensor *parameter, *gradient, *master, *step;
  const at::Tensor* moments[UPDATE_MOMENTS];
  const at::Tensor* scales[UPDATE_MOMENTS];
  bool first;
};
BRIMFUL_FIELD(BrimfulUpdate, parameter, 0);
BRIMFUL_FIELD(BrimfulUpdate, gradient, 8);
BRIMFUL_FIELD(BrimfulUpdate, master, 16);
BRIMFUL_FIELD(BrimfulUpdate, step, 24);
BRIMFUL_FIELD(BrimfulUpdate, moments, 32);
BRIMFUL_FIELD(BrimfulUpdate, scales, 56);
BRIMFUL_FIELD(BrimfulUpdate, first, 80);
BRIMFUL_SIZE(BrimfulUpdate, 88);

BRIMFUL_FIELD(UpdateOptions, rate, 0);
BRIMFUL_FIELD(UpdateOptions, weight_decay, 8);
BRIMFUL_FIELD(UpdateOptions, eps, 16);
BRIMFUL_FIELD(UpdateOptions, beta1, 24);
BRIMFUL_FIELD(UpdateOptions, beta2, 32);
BRIMFUL_FIELD(UpdateOptions, rule, 40);
BRIMFUL_FIELD(UpdateOptions, nesterov, 44);
BRIMFUL_FIELD(UpdateOptions, decoupled, 45);
BRIMFUL_SIZE(UpdateOptions, 48);

// Coefficients of a step of Newton and Schulz's iteration, least divisor, and number of steps.
struct BrimfulMuon {
  double a, b, c, eps;
  int64_t steps;
};
BRIMFUL_FIELD(BrimfulMuon, a, 0);
BRIMFUL_FIELD(BrimfulMuon, b, 8);
BRIMFUL_FIELD(BrimfulMuon, c, 16);
BRIMFUL_FIELD(BrimfulMuon, eps, 24);
BRIMFUL_FIELD(BrimfulMuon, steps, 32);
BRIMFUL_SIZE(BrimfulMuon, 40);

struct BrimfulAdafactor {
  double beta2_decay, eps1, eps2, threshold;
};
BRIMFUL_FIELD(BrimfulAdafactor, beta2_decay, 0);
BRIMFUL_FIELD(BrimfulAdafactor, eps1, 8);
BRIMFUL_FIELD(BrimfulAdafactor, eps2, 16);
BRIMFUL_FIELD(BrimfulAdafactor, threshold, 24);
BRIMFUL_SIZE(BrimfulAdafactor, 32);

// BatchNorm and its input; absent tensors are null.
struct BrimfulNorm {
  const at::Tensor *x, *weight, *bias, *running_mean, *running_variance;
  double momentum, eps;
  bool training;
};
BRIMFUL_FIELD(BrimfulNorm, x, 0);
BRIMFUL_FIELD(BrimfulNorm, weight, 8);
BRIMFUL_FIELD(BrimfulNorm, bias, 16);
BRIMFUL_FIELD(BrimfulNorm, running_mean, 24);
BRIMFUL_FIELD(BrimfulNorm, running_variance, 32);
BRIMFUL_FIELD(BrimfulNorm, momentum, 40);
BRIMFUL_FIELD(BrimfulNorm, eps, 48);
BRIMFUL_FIELD(BrimfulNorm, training, 56);
BRIMFUL_SIZE(BrimfulNorm, 64);

}  // extern "C"
