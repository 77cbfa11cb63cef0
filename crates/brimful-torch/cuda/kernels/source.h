// The text of a kernel family, with everything that it includes.
#pragma once

#include <stdexcept>

namespace brimful::kernels {

struct Source {
  const char* name;
  const char* text;
};

// A kernel that cannot be had or launched: libtorch's own operations run instead.
class KernelError final : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

}  // namespace brimful::kernels
