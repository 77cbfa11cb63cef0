// Adam on the host from one place in memory into another.
#pragma once

#include <cstdint>

namespace brimful {

// What a step does to every number.
struct HostAdam {
  // Of the parameter: what is added to the gradient of it, and what is left of it.
  float decay, shrink;
  // Shares of the gradient and its square in their averages, and what is left of the latter.
  float average_share, square_share, square_left;
  float correction, eps, step_size;
};

// Parameter, average and average of squares, as they are or as they will be.
template <typename Number>
struct HostAdamPlaces {
  Number *parameter, *average, *square;
};

// The next numbers from the present ones and the gradient.
void host_adam(
    HostAdamPlaces<const float> from, const float* gradient, HostAdamPlaces<float> to,
    int64_t count, const HostAdam& adam);

}  // namespace brimful
