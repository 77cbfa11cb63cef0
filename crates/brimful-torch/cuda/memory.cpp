// Limit on this process's share of a CUDA device's memory.

#include "functions.h"

#include "../bridge/device.h"

#include <ATen/Context.h>
#include <c10/cuda/CUDACachingAllocator.h>

namespace {

// Returns the allocator, which has no devices before CUDA has started.
c10::cuda::CUDACachingAllocator::CUDAAllocator& allocator() {
  at::globalContext().lazyInitDevice(c10::kCUDA);
  return *c10::cuda::CUDACachingAllocator::get();
}

}  // namespace

namespace brimful::memory {

double share(int32_t device) { return allocator().getMemoryFraction(device_of(device).index()); }

void set_share(int32_t device, double share) {
  allocator().setMemoryFraction(share, device_of(device).index());
}

}  // namespace brimful::memory
