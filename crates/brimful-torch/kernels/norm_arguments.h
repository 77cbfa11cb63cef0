// What kernels/norm.cu is told, as both sides see it. All numbers are of one kind but statistics and
// partial sums, which are f32.
#pragma once

// Blocks of a backward that a multiprocessor has registers for, where a thread holds so many words of a row.
#define NORM_BACKWARD_BLOCKS(held) ((held) <= 2 ? 2 : 1)

struct NormForwardArguments {
  const void* x;         // rows × width
  const void* residual;  // added to it; null for none
  void* sum;             // what is normed, where there is a residual
  void* out;             // rows × width
  const void* weight;    // width; null for none
  const void* bias;      // width; null for none
  float* mean;           // rows; null for RMSNorm
  float* scale;          // rows: one over the standard deviation, or over the root of the mean square
  long long rows;
  int width;
  float eps;
};

struct NormBackwardArguments {
  const void* gradient;      // of what came out
  const void* of_sum;        // the gradient that the sum has from elsewhere; null for none
  const void* sum;           // what was normed
  const void* weight;        // width; null for none
  const float* mean;         // rows; null for RMSNorm
  const float* scale;        // rows
  void* of_x;                // the gradient of what was normed
  float* partial_weight;     // blocks × width; null where it is not wanted
  float* partial_bias;       // blocks × width; null where it is not wanted
  long long rows;
  long long rows_of_team;    // each team takes so many rows, one after the other
  int width;
};
