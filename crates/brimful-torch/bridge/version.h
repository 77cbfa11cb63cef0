// Version of libtorch the bridge was written against, for code that uses unstable interfaces.
#pragma once

#include <torch/headeronly/version.h>

// Fails the build with any libtorch other than 2.11: compare `what` with the new sources, then change the number
// here and in src/libtorch.rs.
#define BRIMFUL_READ_AGAIN(what)                                  \
  static_assert(                                                  \
      TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR == 11,      \
      "written against libtorch 2.11; read again in this one: " what)
