// The second half of a sum of columns: what blocks have summed up becomes a parameter's gradient.
#pragma once

#include "kernel_tensors.h"
#include "offered_sums.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

namespace brimful::kernels {

// From partial sums, row blocks × columns; undefined where they are left to be added up with all others'.
inline at::Tensor columns_summed(const at::Tensor& partials, const at::Tensor& parameter) {
  if (leave_partials(parameter, partials)) return {};
  auto sums = at::empty({partials.size(1)}, parameter.options());
  ColumnSumsArguments arguments{};
  arguments.from[0] = partials.const_data_ptr<float>();
  arguments.into[0] = sums.mutable_data_ptr();
  arguments.kind = static_cast<int>(number_kind(parameter));
  arguments.rows = static_cast<int>(partials.size(0));
  arguments.columns = static_cast<int>(partials.size(1));
  functions()->column_sums(arguments);
  return sums;
}

}  // namespace brimful::kernels
