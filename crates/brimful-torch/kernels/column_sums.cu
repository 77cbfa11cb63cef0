// Column sums of tables of partial sums: of one or two tables, written to parameters' gradients; or of many tables,
// each added to a sum:
//
//   from [rows × columns] ──▶ one column per lane, warps alternate over rows ──▶ warps in order ──▶ into

#include "prelude.cuh"
#include "column_sums_arguments.h"

#define WARPS 16

// Returns the sum of a column, in the first warp's lanes.
DEVICE float column_sum(const float* from, int rows, int columns, int column) {
  __shared__ float of_warps[WARPS][32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  float sum = 0.0f;
  if (column < columns) {
#pragma unroll 4
    for (int row = warp; row < rows; row += WARPS) {
      sum += from[static_cast<long long>(row) * columns + column];
    }
  }
  of_warps[warp][lane] = sum;
  __syncthreads();
  if (warp != 0) return 0.0f;
  for (int other = 1; other < WARPS; ++other) sum += of_warps[other][lane];
  return sum;
}

DEVICE int own_column() { return blockIdx.x * 32 + threadIdx.x % 32; }

KERNEL void __launch_bounds__(32 * WARPS) column_sums(const ColumnSumsArguments a) {
  const int column = own_column();
  const float sum = column_sum(a.from[blockIdx.y], a.rows, a.columns, column);
  if (threadIdx.x < 32 && column < a.columns) store_number(a.into[blockIdx.y], column, a.kind, sum);
}

KERNEL void __launch_bounds__(32 * WARPS) add_column_sums(const AddColumnSumsArguments a) {
  const int table = blockIdx.y, columns = a.columns[table], column = own_column();
  // Tables differ in width.
  if (blockIdx.x * 32 >= columns) return;
  const float sum = column_sum(a.from[table], a.rows[table], columns, column);
  if (threadIdx.x >= 32 || column >= columns) return;
  float* into = a.into[table] + column;
  *into = a.adds[table] ? *into + sum : sum;
}
