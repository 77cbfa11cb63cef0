// Out-of-place Adam on the host.
#pragma once

#include <cstdint>

namespace brimful {

// Coefficients of a step, the same for every element.
struct HostAdam {
  // Weight decay: factor of the parameter added to its gradient, and factor that shrinks the parameter.
  float decay, shrink;
  // Weights of the new gradient and of its square in their averages, and decay of the average of squares.
  float average_share, square_share, square_left;
  float correction, eps, step_size;
};

// Parameter, average and average of squares, before or after a step.
template <typename Number>
struct HostAdamPlaces {
  Number *parameter, *average, *square;
};

// Computes the next values from the present ones and the gradient.
void host_adam(
    HostAdamPlaces<const float> from, const float* gradient, HostAdamPlaces<float> to,
    int64_t count, const HostAdam& adam);

}  // namespace brimful
