// Arguments of kernels/column_partials.cu, shared with the C++ code that launches it.
#pragma once

struct ColumnPartialsArguments {
  const void* from;   // rows × columns
  float* into;        // row blocks × columns
  long long rows;
  long long rows_of_block;
  int columns;
};
