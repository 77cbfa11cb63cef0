// Steps of optimizers, for other files of the bridge.
#pragma once

#include "mirrored.h"

#include <ATen/core/Tensor.h>

namespace brimful {

// Updates parameters of one device and dtype in place, and increments their step counters. `rate`, unless null,
// multiplies the rate of the options.
void update(
    const BrimfulUpdate* all, size_t count, const UpdateOptions& options, const at::Tensor* rate);

}  // namespace brimful
