// Which libtorch the bridge was written against, where it uses what libtorch does not promise to keep.
#pragma once

#include <torch/headeronly/version.h>

// Ends the build with another libtorch than 2.11: `what` is to be compared with its sources, and then
// the number changed, here and in src/libtorch.rs.
#define BRIMFUL_READ_AGAIN(what)                                  \
  static_assert(                                                  \
      TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR == 11,      \
      "written against libtorch 2.11; read again in this one: " what)
