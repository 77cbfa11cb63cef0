// BatchNorm, ReLU and the addition before it, in kernels of our own: what goes in and what comes out.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>

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

// All of a backward's inputs. `mask` is empty where it is found from x again; with pooling it is the
// place of each maximum.
struct BatchNormGradient {
  at::Tensor dy, more_dy;
  at::Tensor x, saved, mask;
  at::Tensor other_x, other_saved;
  bool training, relu;
  bool keeps_residual;
  // What the weights' gradients are to be of; undefined: not wanted.
  at::Tensor weight, bias, other_weight, other_bias;
  bool pooled;
};

struct BatchNormGradients {
  at::Tensor dx, d_weight, d_bias;
  at::Tensor d_residual;
  at::Tensor other_dx, other_d_weight, other_d_bias;
};

// y and, if `for_backward`, what that needs.
BatchNormed batch_norm_forward(const BatchNormGiven& norm, const Addend& addend, bool relu, bool for_backward);

// What the forward finds of each channel, alone; running statistics move.
at::Tensor batch_norm_statistics(const BatchNormGiven& norm);

// The mean and the variance of each channel, in f32.
std::array<at::Tensor, 2> batch_norm_moments(const at::Tensor& x);

// Of BatchNorm, ReLU and a pooling of 3×3, stride 2 and padding 1: y, and as its mask the place of
// each maximum in its window.
BatchNormed batch_norm_pool(const at::Tensor& x, const at::Tensor& saved);

BatchNormGradients batch_norm_backward(const BatchNormGradient& gradient);

}  // namespace brimful::kernels
