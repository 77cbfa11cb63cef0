// What kernels/column_sums.cu is told, as both sides see it.
#pragma once

struct ColumnSumsArguments {
  const float* from[2];  // rows × columns each
  void* into[2];         // columns each; the second is null where there is one table alone
  int kind;              // of what is written: 0 is f32, 1 bf16, 2 f16
  int rows;
  int columns;
};

// Tables in one launch of those that are added to sums.
#define TABLES_AT_ONCE 96

struct AddColumnSumsArguments {
  const float* from[TABLES_AT_ONCE];  // rows × columns each
  float* into[TABLES_AT_ONCE];        // columns each
  int rows[TABLES_AT_ONCE];
  int columns[TABLES_AT_ONCE];
  bool adds[TABLES_AT_ONCE];          // to what is there, which is overwritten otherwise
};
