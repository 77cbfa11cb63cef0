// Text of a kernel family, with its includes inlined.
#pragma once

#include <stdexcept>

namespace brimful::kernels {

struct Source {
  const char* name;
  const char* text;
};

// Error of a kernel that is not available or cannot be launched: libtorch's own operations run instead.
class KernelError final : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

}  // namespace brimful::kernels
