// BatchNorm, ReLU and the addition before it, in kernels of our own: what goes in and what comes out.
#pragma once

#include <ATen/core/Tensor.h>

#include <tuple>

namespace brimful::kernels {

// One BatchNorm and its input, channels last and dense. Weight, bias and running statistics may be
// undefined; they are f32, or of the input's kind.
struct BatchNormGiven {
  at::Tensor x, weight, bias, running_mean, running_variance;
  bool training;
  double momentum, eps;
};

// What is added before the ReLU: nothing, a tensor, or the input of a BatchNorm whose statistics are
// known.
struct Addend {
  at::Tensor tensor, saved;
};

struct BatchNormed {
  at::Tensor y;
  // For the backward: what the forward found of each channel, and where ReLU let pass.
  at::Tensor saved, mask;
};

// What a backward takes of one BatchNorm.
struct BatchNormDone {
  at::Tensor x, saved;
  // What the gradients are to be like; undefined: not wanted.
  at::Tensor weight, bias;
};

// All of a backward's inputs. `mask` is empty where it is found from x again; with pooling it is the
// place of each maximum.
struct BatchNormGradient {
  at::Tensor dy, more_dy, mask;
  // The other one under the same sum has no x where there is none.
  BatchNormDone own, other;
  bool training, relu, keeps_residual, pooled;
};

struct BatchNormGradients {
  struct Of {
    at::Tensor dx, d_weight, d_bias;
  };
  Of own, other;
  at::Tensor d_residual;
};

// How many squares of 2×2 pixels pictures have, those beyond an odd side among them: a pooling's backward counts by
// them.
inline int64_t squares_of(const at::Tensor& x) {
  const auto half = [](int64_t side) { return (side + 1) / 2; };
  return x.size(0) * half(x.size(2)) * half(x.size(3));
}

// y and, if `for_backward`, what that needs.
BatchNormed batch_norm_forward(const BatchNormGiven& norm, const Addend& addend, bool relu, bool for_backward);

// What the forward finds of each channel, alone; running statistics move.
at::Tensor batch_norm_statistics(const BatchNormGiven& norm);

// The mean and the variance of each channel, in f32.
std::tuple<at::Tensor, at::Tensor> batch_norm_moments(const at::Tensor& x);

// Of BatchNorm, ReLU and a pooling of 3×3, stride 2 and padding 1, of fewer than 2^28 squares: y, and as its mask the
// place of each maximum in its window.
BatchNormed batch_norm_pool(const at::Tensor& x, const at::Tensor& saved);

BatchNormGradients batch_norm_backward(const BatchNormGradient& gradient);

}  // namespace brimful::kernels
