// Sums that a step offers while it goes backward: the node that makes a parameter's gradient may add to its
// sum at once, and give no gradient. A product adds to an f32 sum in the pass that computes it; partial sums
// of columns are left until the end, and added up together.
#pragma once

#include "tensors.h"
#include "version.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>

BRIMFUL_READ_AGAIN("addmm with an output of another kind, which only CUDA has");

namespace brimful {

// Adds a · b to the sum, which is made where there is none yet. Halves are multiplied into a sum of f32, on CUDA alone.
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
  // Not before: what fails leaves no sum of nothing.
  sum = into;
}

// The sum for this parameter's gradient, undefined where nothing has been added yet; null where none is
// offered. It stands until the backward is over. The current stream comes after those that have added to it.
at::Tensor* offered_sum(const at::Tensor& parameter);

// Whether partial sums of this parameter's gradient may be left: a sum in f32 is offered for it.
bool takes_partials(const at::Tensor& parameter);

// Leaves them, f32 of row blocks × columns, to be added to its sum.
void leave_partials(const at::Tensor& parameter, const at::Tensor& partials);

}  // namespace brimful
