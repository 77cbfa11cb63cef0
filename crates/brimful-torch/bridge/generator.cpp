// State of a device's default generator, saved and restored.

#include "device.h"
#include "guard.h"

#include <ATen/Context.h>
#include <ATen/core/Tensor.h>

#include <mutex>

namespace {

// Runs `body` with the generator locked.
template <class Body>
int32_t with_generator(int32_t device, char** message, Body&& body) noexcept {
  return brimful::guarded(message, [&] {
    auto generator = at::globalContext().defaultGenerator(brimful::device_of(device));
    const std::lock_guard<std::mutex> lock(generator.mutex());
    body(generator);
  });
}

}  // namespace

extern "C" {

int32_t brimful_generator_state(int32_t device, at::Tensor** out, char** message) noexcept {
  return with_generator(device, message, [&](const at::Generator& generator) {
    *out = new at::Tensor(generator.get_state());
  });
}

int32_t brimful_set_generator_state(
    int32_t device, const at::Tensor* state, char** message) noexcept {
  return with_generator(
      device, message, [&](at::Generator& generator) { generator.set_state(*state); });
}

int32_t brimful_seed_generator(int32_t device, uint64_t seed, char** message) noexcept {
  return with_generator(
      device, message, [&](at::Generator& generator) { generator.set_current_seed(seed); });
}

}  // extern "C"
