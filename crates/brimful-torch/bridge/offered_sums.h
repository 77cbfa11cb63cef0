// Sums that a step offers during its backward: the node that computes a parameter's gradient may add it to the
// sum at once and return no gradient. A product adds into an f32 sum in the same kernel; partial sums of columns
// are deferred to the end and added up together.
#pragma once

#include "tensors.h"
#include "version.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>

BRIMFUL_READ_AGAIN("addmm with an output of another kind, which only CUDA has");

namespace brimful {

// Adds a · b to the sum, which is created if there is none yet. Half precision is multiplied into an f32 sum, on
// CUDA only.
inline void add_product(at::Tensor& sum, const at::Tensor& a, const at::Tensor& b) {
  const int beta = sum.defined() ? 1 : 0;
  auto into = sum;
  if (!sum.defined()) {
    into = at::empty({a.size(0), b.size(1)}, a.options().dtype(sum_kind(a.scalar_type())));
  }
  if (into.scalar_type() == a.scalar_type()) {
    at::addmm_out(into, into, a, b, beta);
  } else {
    at::addmm_out(into, into, a, b, into.scalar_type(), beta);
  }
  // Assigned last, so that a failure leaves no empty sum behind.
  sum = into;
}

// Returns the sum for this parameter's gradient, undefined if nothing has been added yet; null if none is offered.
// The pointer stays valid until the backward is over. The current stream is ordered after all streams that have
// added to the sum.
at::Tensor* offered_sum(const at::Tensor& parameter);

// Returns whether partial sums of this parameter's gradient may be deferred: an f32 sum is offered for it.
bool takes_partials(const at::Tensor& parameter);

// Defers partial sums, f32 of row blocks × columns, to be added to the parameter's sum.
void leave_partials(const at::Tensor& parameter, const at::Tensor& partials);

}  // namespace brimful
