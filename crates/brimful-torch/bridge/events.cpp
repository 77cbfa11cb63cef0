// Events: mark a point in a stream's work, to wait for or to measure time between.

#include "device.h"
#include "guard.h"

#include <c10/core/Event.h>

using brimful::device_of;
using brimful::guarded;
using brimful::stream_of;

extern "C" {

int32_t brimful_event_new(int32_t device, c10::Event** out, char** message) noexcept {
  return guarded(message, [&] {
    *out = new c10::Event(device_of(device).type(), c10::EventFlag::BACKEND_DEFAULT);
  });
}

void brimful_event_drop(c10::Event* event) noexcept { delete event; }

int32_t brimful_event_record(
    c10::Event* event, int32_t device, int64_t stream, char** message) noexcept {
  return guarded(message, [&] { event->record(stream_of(device, stream)); });
}

// Makes the stream wait for the event; the host does not wait.
int32_t brimful_event_block(
    const c10::Event* event, int32_t device, int64_t stream, char** message) noexcept {
  return guarded(message, [&] { event->block(stream_of(device, stream)); });
}

int32_t brimful_event_query(const c10::Event* event, bool* reached, char** message) noexcept {
  return guarded(message, [&] { *reached = event->query(); });
}

int32_t brimful_event_synchronize(const c10::Event* event, char** message) noexcept {
  return guarded(message, [&] { event->synchronize(); });
}

int32_t brimful_event_elapsed(
    const c10::Event* from, const c10::Event* to, double* milliseconds, char** message) noexcept {
  return guarded(message, [&] { *milliseconds = from->elapsedTime(*to); });
}

}  // extern "C"
