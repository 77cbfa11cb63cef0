// Host memory, and pinning of its pages so that a device copies asynchronously.

#include "cuda.h"
#include "device.h"
#include "guard.h"

#include <ATen/Context.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <cstdint>

using brimful::driver_function;
using brimful::guarded;

namespace {

// Pinned for every device, not only the current one (CU_MEMHOSTREGISTER_PORTABLE).
constexpr unsigned kForEveryDevice = 1;

void check(int failed, const char* what) {
  TORCH_CHECK(failed == 0, what, " answers with error ", failed);
}

}  // namespace

extern "C" {

// Allocates bytes that begin at a multiple of `alignment`.
int32_t brimful_host_bytes(
    size_t bytes, size_t alignment, at::Tensor** out, char** message) noexcept {
  return guarded(message, [&] {
    // A view that autograd knows of would hold a second reference to the whole block.
    const at::AutoDispatchBelowADInplaceOrView unknown_to_autograd;
    const auto all = at::empty({static_cast<int64_t>(bytes + alignment)}, at::kByte);
    const auto start = reinterpret_cast<uintptr_t>(all.data_ptr());
    const auto skipped = (alignment - start % alignment) % alignment;
    *out = new at::Tensor(
        all.narrow(0, static_cast<int64_t>(skipped), static_cast<int64_t>(bytes)));
  });
}

// Wraps foreign bytes in a tensor; `release(owner)` is called when no tensor uses them any more.
int32_t brimful_lent_bytes(
    void* start, size_t bytes, void* owner, void (*release)(void*), at::Tensor** out,
    char** message) noexcept {
  return guarded(message, [&] {
    const auto give_back = [owner, release](void*) { release(owner); };
    *out = new at::Tensor(
        at::from_blob(start, {static_cast<int64_t>(bytes)}, give_back, at::kByte));
  });
}

// Pins the pages in place. The memory must be unpinned before it is freed.
int32_t brimful_pin_pages(void* memory, size_t bytes, int32_t device, char** message) noexcept {
  return guarded(message, [&] {
    const auto on = brimful::device_of(device);
    at::globalContext().lazyInitDevice(on.type());
    // `setDevice` creates the driver context of a thread that has not used the device yet.
    const c10::DeviceGuard there(on);
    c10::impl::VirtualGuardImpl(on.type()).setDevice(on);
    using Register = int(void*, size_t, unsigned);
    check(
        driver_function<Register>("cuMemHostRegister_v2")(memory, bytes, kForEveryDevice),
        "cuMemHostRegister");
  });
}

int32_t brimful_unpin_pages(void* memory, char** message) noexcept {
  return guarded(message, [&] {
    check(driver_function<int(void*)>("cuMemHostUnregister")(memory), "cuMemHostUnregister");
  });
}

}  // extern "C"
