// Arguments of kernels/fill.cu, shared by both sides.
#pragma once

struct FillArguments {
  void* into;                // aligned to 16 bytes
  unsigned long long bytes;
  unsigned int pattern;      // value of each four bytes
};
