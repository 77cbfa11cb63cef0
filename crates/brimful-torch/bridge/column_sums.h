// Second stage of a column sum: reduces the partial sums of blocks to a parameter's gradient.
#pragma once

#include "kernel_tensors.h"
#include "offered_sums.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <initializer_list>

namespace brimful::kernels {

// Partial sums of blocks (row blocks × columns, or undefined), the parameter, and the gradient to write.
struct ColumnTable {
  at::Tensor partials;
  const at::Tensor& parameter;
  at::Tensor& gradient;
};

// Reduces up to two tables in one launch. A gradient stays undefined if its partial sums are deferred to the end
// of the backward.
inline void sum_columns(std::initializer_list<ColumnTable> tables) {
  ColumnSumsArguments arguments{};
  int count = 0;
  for (const auto& [partials, parameter, gradient] : tables) {
    if (!partials.defined() || takes_partials(parameter)) continue;
    gradient = at::empty({partials.size(1)}, parameter.options());
    arguments.from[count] = partials.const_data_ptr<float>();
    arguments.into[count] = gradient.mutable_data_ptr();
    arguments.kind = number_kind(parameter);
    arguments.rows = static_cast<int>(partials.size(0));
    arguments.columns = static_cast<int>(partials.size(1));
    ++count;
  }
  if (count > 0) functions()->column_sums(arguments);
  // Sums are deferred last: if a launch fails, all gradients are computed in another way, and sums deferred before
  // would count twice.
  for (const auto& [partials, parameter, gradient] : tables) {
    if (partials.defined() && !gradient.defined()) leave_partials(parameter, partials);
  }
}

}  // namespace brimful::kernels
