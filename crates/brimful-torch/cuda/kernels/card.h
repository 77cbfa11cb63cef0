// The figures of a device that grids, slots and shared memory follow.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace brimful::kernels {

struct Card {
  int multiprocessors;
  size_t shared_bytes_per_block;
  int major, minor;
};

// Those of the device, or of the smaller one that it is taken for. Throws a KernelError.
Card card(int device);

// What the device's kernels are compiled for, such as 90. Throws a KernelError below 80, the oldest
// whose instructions they use.
int architecture(int device);

// For what the device's kernels are compiled, and by what, such as "sm_90, NVRTC 13.0".
std::string describe(int device);

// Takes every device for a smaller one, for tests: a figure of nothing is the device's own.
void pretend(int multiprocessors, size_t shared_bytes_per_block);

// Lets a launch of this thread's fail, after so many more, for tests; none where the number is negative. Gives what
// was left of the number before.
int64_t pretend_failure(int64_t launches);
// A KernelError where it is that launch.
void fail_if_pretended();

}  // namespace brimful::kernels
