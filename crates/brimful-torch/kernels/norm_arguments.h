// Arguments of kernels/norm.cu, shared with the C++ code that launches it. All numbers have one dtype except
// statistics and partial sums, which are f32.
#pragma once

// Blocks of a backward per multiprocessor that registers allow, if a thread holds this many words of a row.
#define NORM_BACKWARD_BLOCKS(held) ((held) <= 2 ? 2 : 1)

struct NormForwardArguments {
  const void* x;         // rows × width
  const void* residual;  // added to x; null for none
  void* sum;             // input of the norm, if there is a residual
  void* out;             // rows × width
  const void* weight;    // width; null for none
  const void* bias;      // width; null for none
  float* mean;           // rows; null for RMSNorm
  float* scale;          // rows: inverse standard deviation, or inverse root mean square
  long long rows;
  int width;
  float eps;
};

struct NormBackwardArguments {
  const void* gradient;      // gradient of the output
  const void* of_sum;        // gradient of the sum from its other uses; null for none
  const void* sum;           // input of the norm
  const void* weight;        // width; null for none
  const float* mean;         // rows; null for RMSNorm
  const float* scale;        // rows
  void* of_x;                // gradient of the norm's input
  float* partial_weight;     // blocks × width; null if not wanted
  float* partial_bias;       // blocks × width; null if not wanted
  long long rows;
  long long rows_of_team;    // consecutive rows of each team
  int width;
};
