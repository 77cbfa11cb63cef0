// Device properties that determine grids, slots and shared memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace brimful::kernels {

struct Gpu {
  int multiprocessors;
  size_t shared_bytes_per_block;
  int major, minor;
};

// Returns the properties of the device, or of the smaller one it is treated as. Throws a KernelError.
Gpu gpu(int device);

// Returns the architecture that the device's kernels are compiled for, such as 90. Throws a KernelError below 80,
// the oldest whose instructions they use.
int architecture(int device);

// Describes the target and the compiler of the device's kernels, such as "sm_90, NVRTC 13.0".
std::string describe(int device);

// Treats every device as a smaller one, for tests; 0 keeps the device's own value.
void pretend(int multiprocessors, size_t shared_bytes_per_block);

// Makes a launch of this thread fail after this many others, for tests; none if the number is negative. Returns
// the remaining count of the previous call.
int64_t pretend_failure(int64_t launches);
// Throws a KernelError if this launch is to fail.
void fail_if_pretended();

}  // namespace brimful::kernels
