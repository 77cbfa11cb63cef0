// What kernels/column_sums.cu is told, as both sides see it.
#pragma once

struct ColumnSumsArguments {
  const float* from[2];  // rows × columns each
  void* into[2];         // columns each; the second is null where there is one table alone
  int kind;              // of what is written: 0 is f32, 1 bf16, 2 f16
  int rows;
  int columns;
};
