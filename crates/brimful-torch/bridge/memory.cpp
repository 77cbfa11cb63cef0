// Memory statistics of an accelerator: its caching allocator, and free memory.

#include "device.h"
#include "guard.h"

#include <ATen/Context.h>
#include <c10/core/CachingDeviceAllocator.h>

#include <array>

using brimful::device_of;
using brimful::guarded;

namespace {

// Returns a device's allocator, which is not set up before its first use.
c10::DeviceAllocator& allocator_of(c10::Device device) {
  at::globalContext().lazyInitDevice(device.type());
  return *c10::getDeviceAllocator(device.type());
}

}  // namespace

extern "C" {

// Writes the statistics in the order of src/memory.rs: in bytes, except retries and refusals, which are counts.
int32_t brimful_device_memory(
    int32_t index, std::array<int64_t, 7>* out, char** message) noexcept {
  return guarded(message, [&] {
    using c10::CachingAllocator::StatType;
    const auto device = device_of(index);
    auto& allocator = allocator_of(device);
    const auto stats = allocator.getDeviceStats(device.index());
    const auto all = static_cast<size_t>(StatType::AGGREGATE);
    const auto [free, total] = allocator.getMemoryInfo(device.index());
    *out = {
        stats.allocated_bytes[all].current, stats.allocated_bytes[all].peak,
        stats.reserved_bytes[all].current,  stats.num_alloc_retries,
        stats.num_ooms,
        static_cast<int64_t>(free),         static_cast<int64_t>(total)};
  });
}

int32_t brimful_reset_peak(int32_t index, char** message) noexcept {
  return guarded(message, [&] {
    const auto device = device_of(index);
    allocator_of(device).resetPeakStats(device.index());
  });
}

int32_t brimful_empty_cache(int32_t index, char** message) noexcept {
  return guarded(message, [&] { allocator_of(device_of(index)).emptyCache(); });
}

}  // extern "C"
