// Arguments of kernels/column_sums.cu, shared with the C++ code that launches it.
#pragma once

struct ColumnSumsArguments {
  const float* from[2];  // rows × columns each
  void* into[2];         // columns each; the second is null if there is only one table
  int kind;              // dtype of the result: 0 is f32, 1 bf16, 2 f16
  int rows;
  int columns;
};

// Most tables added to sums in one launch.
#define TABLES_AT_ONCE 96

struct AddColumnSumsArguments {
  const float* from[TABLES_AT_ONCE];  // rows × columns each
  float* into[TABLES_AT_ONCE];        // columns each
  int rows[TABLES_AT_ONCE];
  int columns[TABLES_AT_ONCE];
  bool adds[TABLES_AT_ONCE];          // adds to the present values instead of overwriting them
};
