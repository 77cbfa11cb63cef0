// Arguments of kernels/update.cu, shared with the C++ code that launches it and with the loops for CPUs
// (bridge/host_update.cpp).
#pragma once

// Consecutive elements that share the scale of an 8-bit moment.
#define UPDATE_GROUP 128
// Most moments of a parameter: Adam's two averages, and the largest square of amsgrad.
#define UPDATE_MOMENTS 3

// Numbered as in src/optim.rs. A direction is Muon's momentum, written in the parameter's place.
enum UpdateRule { kSgd = 0, kAdam = 1, kDirection = 2 };

// Settings of a method. For SGD and directions `beta1` is the momentum; for SGD `beta2` is the dampening.
struct UpdateOptions {
  double rate, weight_decay, eps, beta1, beta2;
  int rule;
  bool nesterov;
  bool decoupled;  // weight decay shrinks the parameter, instead of adding to its gradient
};

// Dtypes of a parameter, a gradient or a moment. A bf16 parameter has a 16-bit remainder beside it, an f16 parameter an
// f32 master.
enum UpdateKind {
  kUpdateF32 = 0,
  kUpdateBf16 = 1,
  kUpdateF16 = 2,
  kUpdateF64 = 3,
  kUpdateEightBit = 4
};

// One parameter in memory order, or a piece of it that begins at a multiple of UPDATE_GROUP.
struct UpdatePlaces {
  void* parameter;
  void* master;                   // remainder of bf16, master of f16, else null
  void* moments[UPDATE_MOMENTS];  // those present come first, then nulls
  float* scales[UPDATE_MOMENTS];  // of 8-bit moments, one a group
};

// Tensors per launch: as many as fit into 4 KiB of arguments.
#define UPDATED_AT_ONCE 40

// Parameters of one dtype, with moments of one dtype.
struct UpdateArguments {
  UpdateOptions options;
  const float* rate;  // multiplies the rate of the options; null for none
  UpdatePlaces places[UPDATED_AT_ONCE];
  const void* gradients[UPDATED_AT_ONCE];
  const float* steps[UPDATED_AT_ONCE];  // number of steps before this one; null if the rule counts no steps
  long long count[UPDATED_AT_ONCE];
  unsigned char gradient_kinds[UPDATED_AT_ONCE];
  bool first[UPDATED_AT_ONCE];    // parameter's first step
  bool aligned[UPDATED_AT_ONCE];  // all addresses are multiples of 16 bytes
};
