// Arguments of kernels/activation.cu, shared with the C++ code that launches it. All numbers have one dtype except
// partial sums.
#pragma once

struct ActivationArguments {
  const void* x;           // rows × inputs
  const void* bias;        // inputs; null for none
  void* out;               // forward: rows × outputs
  const void* gradient;    // backward: gradient of the output
  void* of_x;              // backward: gradient of x, rows × inputs
  float* partial_bias;     // backward: row blocks × inputs; null if not wanted
  long long rows;
  long long rows_of_block;
  int outputs;             // inputs of a GELU, half of the inputs of a SwiGLU
};
