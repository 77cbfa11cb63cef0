// The state of a device's default generator, taken and put back.

#include "device.h"
#include "guard.h"

#include <ATen/Context.h>
#include <ATen/core/Tensor.h>

#include <mutex>

using brimful::guarded;

namespace {

at::Generator generator_of(int32_t device) {
  return at::globalContext().defaultGenerator(brimful::device_of(device));
}

}  // namespace

extern "C" {

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

}  // extern "C"
