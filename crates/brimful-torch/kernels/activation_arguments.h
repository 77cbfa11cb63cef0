// What kernels/activation.cu is told, as both sides see it. All numbers are of one kind but partial sums.
#pragma once

struct ActivationArguments {
  const void* x;           // rows × inputs
  const void* bias;        // inputs; null for none
  void* out;               // forward: rows × outputs
  const void* gradient;    // backward: of what came out
  void* of_x;              // backward: rows × inputs
  float* partial_bias;     // backward: row blocks × inputs; null where it is not wanted
  long long rows;
  long long rows_of_block;
  int outputs;             // inputs of a GELU, half of the inputs of a SwiGLU
};
