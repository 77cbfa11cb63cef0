// What a device can tell and do: presence, memory figures, random state, streams and events.
//
// All of it goes through libtorch's device-neutral interfaces, so that one binary serves with and
// without CUDA, and no CUDA header is needed to build it.

#include "guard.h"

#include <ATen/Context.h>
#include <ATen/Version.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <dlfcn.h>

using brimful::device_of;
using brimful::guarded;

namespace {

// Before its first use a device's allocator knows of no device.
c10::DeviceAllocator& allocator_of(c10::Device device) {
  at::globalContext().lazyInitDevice(device.type());
  return *c10::getDeviceAllocator(device.type());
}

c10::impl::VirtualGuardImpl guard_of(int32_t device) {
  return c10::impl::VirtualGuardImpl(device_of(device).type());
}

c10::Stream stream_of(int32_t device, int64_t id) {
  return c10::Stream(c10::Stream::UNSAFE, device_of(device), id);
}

at::Generator generator_of(int32_t device) {
  return at::globalContext().defaultGenerator(device_of(device));
}

// A function of NVIDIA's driver, looked up by name because no header of it is needed to build.
template <class Function>
Function* driver_function(const char* name) {
  static void* driver = dlopen("libcuda.so.1", RTLD_NOW);
  TORCH_CHECK(driver != nullptr, "no NVIDIA driver: ", dlerror());
  auto* found = reinterpret_cast<Function*>(dlsym(driver, name));
  TORCH_CHECK(found != nullptr, "the NVIDIA driver has no ", name);
  return found;
}

void* open_cuda() { return dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_GLOBAL); }

// libtorch asks once and for all whether CUDA is there, at the first call that cares (a random seed
// does). So on a machine with an NVIDIA driver it is loaded before `main`. The handle is kept because
// a call whose result nobody uses becomes a jump, and the loader would then not see that it is this
// program that calls, whose rpath it needs.
void* volatile cuda_at_start =
    dlopen("libcuda.so.1", RTLD_LAZY) != nullptr ? open_cuda() : nullptr;

}  // namespace

extern "C" {

void brimful_free_message(char* message) noexcept { free(message); }

// Loads libtorch's CUDA half, which registers its kernels with the libtorch that is running.
int32_t brimful_load_cuda(char** message) noexcept {
  return guarded(message, [] {
    TORCH_CHECK(open_cuda() != nullptr, dlerror());
  });
}

char* brimful_show_config() noexcept { return strdup(at::show_config().c_str()); }
char* brimful_cpu_capability() noexcept { return strdup(at::get_cpu_capability().c_str()); }

// The path of the libtorch that is running, or null.
char* brimful_library_path() noexcept {
  Dl_info info;
  const auto* address = reinterpret_cast<const void*>(&at::globalContext);
  return dladdr(address, &info) != 0 && info.dli_fname != nullptr ? strdup(info.dli_fname)
                                                                  : nullptr;
}

// The newest CUDA version that the driver can serve: 1000 × major + 10 × minor.
int32_t brimful_cuda_driver(int32_t* version, char** message) noexcept {
  return guarded(message, [&] {
    const int failed = driver_function<int(int*)>("cuDriverGetVersion")(version);
    TORCH_CHECK(failed == 0, "the NVIDIA driver answers with error ", failed);
  });
}

int32_t brimful_cuda_name(int32_t index, char** out, char** message) noexcept {
  return guarded(message, [&] {
    char name[256] = {};
    const int failed = driver_function<int(char*, int, int)>("cuDeviceGetName")(
        name, sizeof(name) - 1, index);
    TORCH_CHECK(failed == 0, "the NVIDIA driver answers with error ", failed);
    *out = strdup(name);
  });
}

// Products and convolutions of f32 in TF32, or not; means nothing to a CPU.
int32_t brimful_allow_tf32(bool allowed, char** message) noexcept {
  return guarded(message, [&] {
    at::globalContext().setAllowTF32CuBLAS(allowed);
    at::globalContext().setAllowTF32CuDNN(allowed);
  });
}

// --- memory ---------------------------------------------------------------------------------

struct BrimfulMemory {
  int64_t current, peak, reserved, retries, refusals, free, total;
};

int32_t brimful_device_memory(int32_t index, BrimfulMemory* out, char** message) noexcept {
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

// --- random state ---------------------------------------------------------------------------

int32_t brimful_generator_state(int32_t device, at::Tensor** out, char** message) noexcept {
  return guarded(message, [&] {
    auto generator = generator_of(device);
    const std::lock_guard<std::mutex> lock(generator.mutex());
    *out = new at::Tensor(generator.get_state());
  });
}

int32_t brimful_set_generator_state(
    int32_t device, const at::Tensor* state, char** message) noexcept {
  return guarded(message, [&] {
    auto generator = generator_of(device);
    const std::lock_guard<std::mutex> lock(generator.mutex());
    generator.set_state(*state);
  });
}

int32_t brimful_seed_generator(int32_t device, uint64_t seed, char** message) noexcept {
  return guarded(message, [&] {
    auto generator = generator_of(device);
    const std::lock_guard<std::mutex> lock(generator.mutex());
    generator.set_current_seed(seed);
  });
}

// --- streams --------------------------------------------------------------------------------

int32_t brimful_stream_from_pool(int32_t device, int64_t* id, char** message) noexcept {
  return guarded(message, [&] {
    *id = guard_of(device).getStreamFromGlobalPool(device_of(device)).id();
  });
}

// From libtorch's pool of high priority, which is apart from the other.
int32_t brimful_stream_urgent(int32_t device, int64_t* id, char** message) noexcept {
  return guarded(message, [&] {
    const bool high_priority = true;
    *id = guard_of(device).getStreamFromGlobalPool(device_of(device), high_priority).id();
  });
}

int32_t brimful_stream_current(int32_t device, int64_t* id, char** message) noexcept {
  return guarded(message, [&] { *id = guard_of(device).getStream(device_of(device)).id(); });
}

// The stream that threads use unless they have entered another.
int32_t brimful_stream_common(int32_t device, int64_t* id, char** message) noexcept {
  return guarded(
      message, [&] { *id = guard_of(device).getDefaultStream(device_of(device)).id(); });
}

// Makes the stream current on this thread and gives the last one's id.
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

// Tells the allocator that the stream uses the tensor, so its memory is not reused too early.
int32_t brimful_record_stream(
    const at::Tensor* tensor, int32_t device, int64_t id, char** message) noexcept {
  return guarded(message, [&] { tensor->record_stream(stream_of(device, id)); });
}

int32_t brimful_pin(const at::Tensor* tensor, at::Tensor** out, char** message) noexcept {
  return guarded(message, [&] { *out = new at::Tensor(tensor->pin_memory()); });
}

// The host's memory of the tensor's shape and kind, in one piece.
int32_t brimful_room_for(
    const at::Tensor* tensor, bool page_locked, at::Tensor** out, char** message) noexcept {
  return guarded(message, [&] {
    const auto options = at::device(at::kCPU).dtype(tensor->dtype()).pinned_memory(page_locked);
    *out = new at::Tensor(at::empty(tensor->sizes(), options, at::MemoryFormat::Contiguous));
  });
}

int32_t brimful_copy(at::Tensor* into, const at::Tensor* from, char** message) noexcept {
  return guarded(message, [&] {
    const at::NoGradGuard no_grad;
    into->copy_(*from, /*non_blocking=*/true);
  });
}

int32_t brimful_send(
    const at::Tensor* tensor, int32_t device, at::Tensor** out, char** message) noexcept {
  return guarded(message, [&] {
    const auto to = device_of(device);
    // Who uses a tensor of the host's does not wait for a stream: it must be there.
    *out = new at::Tensor(tensor->to(to, tensor->scalar_type(), /*non_blocking=*/!to.is_cpu()));
  });
}

// --- events ---------------------------------------------------------------------------------

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

// Makes the stream wait for the event, without making the host wait.
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
