// Queries the driver for a device's properties, once.

#include "gpu.h"

#include "compiler.h"
#include "driver.h"
#include "source.h"

#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>
#include <utility>

namespace brimful::kernels {

namespace {

// Attribute numbers of the driver.
constexpr int kMultiprocessors = 16;
constexpr int kMajor = 75;
constexpr int kMinor = 76;
constexpr int kSharedBytesPerBlock = 97;
// Compute capability 8.0.
constexpr int kMinArchitecture = 80;

std::atomic<int> pretended_multiprocessors{0};
std::atomic<size_t> pretended_shared_bytes{0};
thread_local int64_t launches_to_failure = -1;

int attribute(int device, int number) {
  int value = 0;
  driver().device_attribute(&value, number, device);
  return value;
}

Gpu ask(int ordinal) {
  int device = 0;
  driver().device(&device, ordinal);
  return {
      attribute(device, kMultiprocessors),
      static_cast<size_t>(attribute(device, kSharedBytesPerBlock)), attribute(device, kMajor),
      attribute(device, kMinor)};
}

Gpu real_gpu(int device) {
  static std::mutex mutex;
  static std::map<int, Gpu> known;
  const std::lock_guard<std::mutex> alone(mutex);
  const auto found = known.find(device);
  return found != known.end() ? found->second : known.emplace(device, ask(device)).first->second;
}

}  // namespace

Gpu gpu(int device) {
  Gpu gpu = real_gpu(device);
  if (const int fewer = pretended_multiprocessors) {
    gpu.multiprocessors = std::min(gpu.multiprocessors, fewer);
  }
  if (const size_t less = pretended_shared_bytes) {
    gpu.shared_bytes_per_block = std::min(gpu.shared_bytes_per_block, less);
  }
  return gpu;
}

int architecture(int device) {
  const auto [multiprocessors, shared_bytes, major, minor] = gpu(device);
  const int number = 10 * major + minor;
  if (number >= kMinArchitecture) return number;
  throw KernelError(
      "compute capability " + std::to_string(major) + "." + std::to_string(minor) +
      " is below 8.0");
}

std::string describe(int device) {
  return "sm_" + std::to_string(architecture(device)) + ", NVRTC " + compiler_version();
}

void pretend(int multiprocessors, size_t shared_bytes_per_block) {
  pretended_multiprocessors = multiprocessors;
  pretended_shared_bytes = shared_bytes_per_block;
}

int64_t pretend_failure(int64_t launches) { return std::exchange(launches_to_failure, launches); }

void fail_if_pretended() {
  if (launches_to_failure >= 0 && launches_to_failure-- == 0) {
    throw KernelError("this launch was to fail");
  }
}

}  // namespace brimful::kernels
