// Optimizer steps on the host.
#pragma once

#include "../kernels/update_arguments.h"

#include <cstdint>

namespace brimful {

// A step of one parameter.
struct HostUpdate {
  UpdatePlaces places;
  const void* gradient;
  UpdateKind parameter_kind, gradient_kind, moment_kind;
  bool first;
  double rate;
  float step;  // number of this step, counted from 1
};

// Updates the elements from `begin` to `end`. Both are multiples of UPDATE_GROUP, unless `end` is the number of
// elements.
void host_update(const UpdateOptions& options, const HostUpdate& update, int64_t begin, int64_t end);

}  // namespace brimful
