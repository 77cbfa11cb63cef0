// Arguments of kernels/fill.cu, shared with the C++ code that launches it.
#pragma once

struct FillArguments {
  void* into;                // aligned to 16 bytes
  unsigned long long bytes;
  unsigned int pattern;      // value of each four bytes
};
