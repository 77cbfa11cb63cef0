// Arguments of kernels/column_partials.cu, shared by both sides.
#pragma once

struct ColumnPartialsArguments {
  const void* from;   // rows × columns
  float* into;        // row blocks × columns
  long long rows;
  long long rows_of_block;
  int columns;
};
