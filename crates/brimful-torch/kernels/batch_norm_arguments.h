// What the kernels of batch_norm*.cu are given: included by them, and by the C++ that launches them.
#pragma once

// Per channel, as the forward leaves it for the backward: the mean, 1/√(variance + ε), the scale
// weight/√(variance + ε), and the bias. Four rows of `channels` numbers.
struct BatchNormForward {
  const void* x;
  const void* residual;
  void* y;
  // A bit a number, where ReLU let it pass: a byte for each vector of channels.
  unsigned char* mask;
  const void* weight;  // Null: ones.
  const void* bias;    // Null: zeros.
  // Null: they go nowhere. In evaluation they are read.
  void* running_mean;
  void* running_variance;
  // Of the residual's own BatchNorm, where it has one.
  const float* residual_saved;
  float* saved;
  float* partials;
  int rows, channels;
  // Blocks a slice, rows a block, and steps of it that are kept in shared memory.
  int blocks, chunk, slots;
  int weight_kind, running_kind;
  float eps, momentum;
};

struct BatchNormBackward {
  const void* x;
  const void* dy;
  // A second gradient of the same output, to be added to the first; or null.
  const void* more_dy;
  // As the forward has left it; with pooling the place of each maximum, a byte a number.
  const unsigned char* mask;
  const float* saved;
  void* dx;
  void* d_residual;
  // Another BatchNorm under the same sum: its input and what its forward has left.
  const void* other_x;
  const float* other_saved;
  void* other_dx;
  // Null: not wanted.
  void* d_weight;
  void* d_bias;
  void* other_d_weight;
  void* other_d_bias;
  float* partials;
  // Numbers a channel; and its rows, which are more where squares of pixels go beyond an odd side.
  int count;
  int rows, channels;
  int blocks, chunk, slots;
  int weight_kind, other_weight_kind;
  // Whether the statistics were the batch's own, so that they have a gradient too.
  int training;
  // With pooling: of the input, and of the output.
  int height, width, pooled_height, pooled_width;
};

struct BatchNormPool {
  const void* x;
  const float* saved;
  void* y;
  unsigned char* place;
  // Vectors of channels in the output.
  int total;
  int channels, height, width, pooled_height, pooled_width;
};
