// The second half of a sum of columns: what blocks have summed up becomes a parameter's gradient.
#pragma once

#include "kernel_tensors.h"
#include "offered_sums.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <initializer_list>

namespace brimful::kernels {

// What blocks have summed up, row blocks × columns, or nothing; the parameter whose gradient it is, and the place
// for it.
struct ColumnTable {
  at::Tensor partials;
  const at::Tensor& parameter;
  at::Tensor& gradient;
};

// Of two tables at most, in one launch. A gradient stays undefined where it is left to be added up with all others'.
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
  // Last: where a launch fails, all is computed in another way, and what was left would count twice.
  for (const auto& [partials, parameter, gradient] : tables) {
    if (partials.defined() && !gradient.defined()) leave_partials(parameter, partials);
  }
}

}  // namespace brimful::kernels
