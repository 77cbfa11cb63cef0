// Structs that src/ffi.rs mirrors. Both sides assert the offset of each field, so that neither can change alone.
#pragma once

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

struct BrimfulSgd {
  double learning_rate, momentum, dampening, weight_decay;
  bool nesterov, first;
};
BRIMFUL_FIELD(BrimfulSgd, learning_rate, 0);
BRIMFUL_FIELD(BrimfulSgd, momentum, 8);
BRIMFUL_FIELD(BrimfulSgd, dampening, 16);
BRIMFUL_FIELD(BrimfulSgd, weight_decay, 24);
BRIMFUL_FIELD(BrimfulSgd, nesterov, 32);
BRIMFUL_FIELD(BrimfulSgd, first, 33);
BRIMFUL_SIZE(BrimfulSgd, 40);

struct BrimfulAdam {
  double learning_rate, beta1, beta2, eps, weight_decay;
  bool amsgrad, decoupled;
};
BRIMFUL_FIELD(BrimfulAdam, learning_rate, 0);
BRIMFUL_FIELD(BrimfulAdam, beta1, 8);
BRIMFUL_FIELD(BrimfulAdam, beta2, 16);
BRIMFUL_FIELD(BrimfulAdam, eps, 24);
BRIMFUL_FIELD(BrimfulAdam, weight_decay, 32);
BRIMFUL_FIELD(BrimfulAdam, amsgrad, 40);
BRIMFUL_FIELD(BrimfulAdam, decoupled, 41);
BRIMFUL_SIZE(BrimfulAdam, 48);

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
