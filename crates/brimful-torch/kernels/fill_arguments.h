// What kernels/fill.cu is told, as both sides see it.
#pragma once

struct FillArguments {
  void* into;                // from a multiple of 16 bytes on
  unsigned long long bytes;
  unsigned int pattern;      // what each four bytes become
};
