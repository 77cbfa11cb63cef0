// What kernels/add_halves.cu is told, as both sides see it.
#pragma once

// Tensors in one launch: as many as 4 KiB of arguments hold with room to spare.
#define ADDED_AT_ONCE 96

struct AddHalvesArguments {
  const void* from[ADDED_AT_ONCE];
  float* into[ADDED_AT_ONCE];
  long long count[ADDED_AT_ONCE];  // numbers of each
};
