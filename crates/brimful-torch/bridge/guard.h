// Converts C++ exceptions at the language boundary into a kind and a message.
#pragma once

#include <c10/util/Exception.h>

#include <cstdint>
#include <cstring>
#include <new>

namespace brimful {

// Must match src/error.rs.
enum Outcome : int32_t { kOk = 0, kOutOfMemory = 1, kOther = 2 };

inline int32_t report(char** message, Outcome outcome, const char* text) noexcept {
  *message = strdup(text);
  return outcome;
}

// Runs `body`. On an exception, stores its text in `*message`, to be freed by brimful_free_message.
template <class Body>
int32_t guarded(char** message, Body&& body) noexcept {
  try {
    body();
    return kOk;
  } catch (const c10::OutOfMemoryError& error) {
    return report(message, kOutOfMemory, error.what_without_backtrace());
  } catch (const c10::Error& error) {
    return report(message, kOther, error.what_without_backtrace());
  } catch (const std::bad_alloc& error) {
    return report(message, kOutOfMemory, error.what());
  } catch (const std::exception& error) {
    return report(message, kOther, error.what());
  } catch (...) {
    return report(message, kOther, "an exception of unknown type");
  }
}

}  // namespace brimful
