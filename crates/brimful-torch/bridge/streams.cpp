// Streams of a device, and waiting for them.

#include "beside.h"
#include "device.h"
#include "guard.h"

#include <ATen/core/Tensor.h>

using brimful::device_of;
using brimful::guard_of;
using brimful::guarded;
using brimful::stream_of;

extern "C" {

int32_t brimful_stream_from_pool(int32_t device, int64_t* id, char** message) noexcept {
  return guarded(message, [&] {
    *id = guard_of(device).getStreamFromGlobalPool(device_of(device)).id();
  });
}

// Returns a stream from libtorch's high-priority pool, which is separate from the normal one.
int32_t brimful_stream_urgent(int32_t device, int64_t* id, char** message) noexcept {
  return guarded(message, [&] {
    const bool high_priority = true;
    *id = guard_of(device).getStreamFromGlobalPool(device_of(device), high_priority).id();
  });
}

int32_t brimful_stream_beside(int32_t device, int64_t* id, char** message) noexcept {
  return guarded(message, [&] { *id = brimful::stream_beside(device_of(device)).id(); });
}

int32_t brimful_stream_current(int32_t device, int64_t* id, char** message) noexcept {
  return guarded(message, [&] { *id = guard_of(device).getStream(device_of(device)).id(); });
}

// Returns the default stream, which threads use unless they have entered another.
int32_t brimful_stream_common(int32_t device, int64_t* id, char** message) noexcept {
  return guarded(
      message, [&] { *id = guard_of(device).getDefaultStream(device_of(device)).id(); });
}

// Makes the stream current on this thread and returns the previous one's id.
int32_t brimful_stream_enter(int32_t device, int64_t id, int64_t* last, char** message) noexcept {
  return guarded(
      message, [&] { *last = guard_of(device).exchangeStream(stream_of(device, id)).id(); });
}

int32_t brimful_stream_synchronize(int32_t device, int64_t id, char** message) noexcept {
  return guarded(message, [&] { stream_of(device, id).synchronize(); });
}

int32_t brimful_device_synchronize(int32_t device, char** message) noexcept {
  return guarded(
      message, [&] { guard_of(device).synchronizeDevice(device_of(device).index()); });
}

// Informs the allocator that the stream uses the tensor, so that its memory is not reused too early.
int32_t brimful_record_stream(
    const at::Tensor* tensor, int32_t device, int64_t id, char** message) noexcept {
  return guarded(message, [&] { tensor->record_stream(stream_of(device, id)); });
}

}  // extern "C"
