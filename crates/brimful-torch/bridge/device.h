// Device numbers of tch, and libtorch's device-neutral interfaces for each device.
//
// All work on a device goes through these, so that one binary serves with and without CUDA.
#pragma once

#include "version.h"

#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <cstdint>

namespace brimful {

// Number -1 is the CPU, 0 and up are CUDA devices.
inline c10::Device device_of(int32_t index) {
  return index < 0 ? c10::Device(c10::kCPU)
                   : c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(index));
}

BRIMFUL_READ_AGAIN("c10::impl::VirtualGuardImpl, and that a stream is its device and its id alone");

inline c10::impl::VirtualGuardImpl guard_of(int32_t device) {
  return c10::impl::VirtualGuardImpl(device_of(device).type());
}

inline c10::Stream stream_of(int32_t device, int64_t id) {
  return c10::Stream(c10::Stream::UNSAFE, device_of(device), id);
}

}  // namespace brimful
