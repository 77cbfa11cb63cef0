// BatchNorm fused with addition and ReLU, in custom kernels: inputs and outputs.
#pragma once

#include <ATen/core/Tensor.h>

#include <tuple>

namespace brimful::kernels {

// One BatchNorm and its input, channels last and dense. Weight, bias and running statistics may be undefined;
// their dtype is f32 or the input's.
struct BatchNormGiven {
  at::Tensor x, weight, bias, running_mean, running_variance;
  bool training;
  double momentum, eps;
};

// Addend before the ReLU: nothing, a tensor, or the input of a BatchNorm whose statistics are known.
struct Addend {
  at::Tensor tensor, saved;
};

struct BatchNormed {
  at::Tensor y;
  // For the backward: per-channel results of the forward, and the mask of the ReLU.
  at::Tensor saved, mask;
};

// Inputs of a backward for one BatchNorm.
struct BatchNormDone {
  at::Tensor x, saved;
  // Templates of the gradients; undefined if not wanted.
  at::Tensor weight, bias;
};

// Inputs of a backward. `mask` is empty if it is recomputed from x; with pooling it holds the position of each
// maximum.
struct BatchNormGradient {
  at::Tensor dy, more_dy, mask;
  // `other`, the second BatchNorm under the same sum, has no x if there is none.
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

// Returns the number of 2×2 pixel squares in the images, including partial ones at an odd side: a pooling's
// backward counts by them.
inline int64_t squares_of(const at::Tensor& x) {
  const auto half = [](int64_t side) { return (side + 1) / 2; };
  return x.size(0) * half(x.size(2)) * half(x.size(3));
}

// Computes y and, if `for_backward`, the tensors that the backward needs.
BatchNormed batch_norm_forward(const BatchNormGiven& norm, const Addend& addend, bool relu, bool for_backward);

// Computes only the forward's per-channel results, and updates the running statistics.
at::Tensor batch_norm_statistics(const BatchNormGiven& norm);

// Returns the mean and the variance of each channel, in f32.
std::tuple<at::Tensor, at::Tensor> batch_norm_moments(const at::Tensor& x);

// Applies BatchNorm with known statistics, ReLU and a max pooling of 3×3, stride 2, padding 1, to fewer than 2^28
// squares. Returns y, and as its mask the position of each maximum in its window.
BatchNormed batch_norm_pool(const at::Tensor& x, const at::Tensor& saved);

BatchNormGradients batch_norm_backward(const BatchNormGradient& gradient);

}  // namespace brimful::kernels
