// Arguments of kernels/add_halves.cu, shared with the C++ code that launches it.
#pragma once

// Tensors per launch: as many as fit into 4 KiB of arguments with some to spare.
#define ADDED_AT_ONCE 96

struct AddHalvesArguments {
  const void* from[ADDED_AT_ONCE];
  float* into[ADDED_AT_ONCE];
  long long count[ADDED_AT_ONCE];  // numbers of each
};
