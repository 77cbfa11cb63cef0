// Arguments of kernels/rotary.cu, shared with the C++ code that launches it.
#pragma once

struct RotaryArguments {
  const void* x;     // rows × heads × width, where rows are samples × sequence
  const float* cos;  // sequence × width/2
  const float* sin;
  void* out;         // same shape as x
  long long total;   // pairs of words: rows × heads × (width/2 / numbers a word)
  int sequence;
  int heads;
  int half;          // width/2
  float sign;        // 1 forward, -1 backward
};
