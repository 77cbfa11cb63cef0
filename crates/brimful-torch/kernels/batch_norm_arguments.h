// Arguments of the kernels in batch_norm*.cu, shared with the C++ code that launches them.
#pragma once

// `saved` holds, per channel, what the forward leaves for the backward: the mean, 1/√(variance + ε), the scale
// weight/√(variance + ε), and the bias, in four rows of `channels` numbers.
struct BatchNormForward {
  const void* x;
  const void* residual;
  void* y;
  // One bit a number, set where ReLU passes it: a byte for each vector of channels.
  unsigned char* mask;
  const void* weight;  // Null: ones.
  const void* bias;    // Null: zeros.
  // Null: not updated. In evaluation they are read.
  void* running_mean;
  void* running_variance;
  // Saved statistics of the residual's own BatchNorm, if it has one.
  const float* residual_saved;
  float* saved;
  float* partials;
  int rows, channels;
  // Blocks per slice, rows per block, and number of a block's steps that are kept in shared memory.
  int blocks, chunk, slots;
  int weight_kind, running_kind;
  float eps, momentum;
};

struct BatchNormBackward {
  const void* x;
  const void* dy;
  // Second gradient of the same output, to be added to the first; or null.
  const void* more_dy;
  // Mask from the forward; with pooling the position of each maximum, a byte a number.
  const unsigned char* mask;
  const float* saved;
  void* dx;
  void* d_residual;
  // Second BatchNorm under the same sum: its input and saved statistics.
  const void* other_x;
  const float* other_saved;
  void* other_dx;
  // Null: not wanted.
  void* d_weight;
  void* d_bias;
  void* other_d_weight;
  void* other_d_bias;
  float* partials;
  // Numbers per channel. With pooling `rows` may be more: squares of pixels extend beyond an odd side.
  int count;
  int rows, channels;
  int blocks, chunk, slots;
  int weight_kind, other_weight_kind;
  // Nonzero if the statistics were the batch's own, so that they have a gradient too.
  int training;
  // With pooling: sizes of the input and of the output.
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
