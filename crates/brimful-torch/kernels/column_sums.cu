// Sums of columns, from partial sums of blocks to a parameter's gradient, of one table or two:
//
//   from [rows × columns] ──▶ a warp's lane a column, warps take turns with rows ──▶ warps in order ──▶ into

#include "prelude.cuh"
#include "column_sums_arguments.h"

#define WARPS 16

KERNEL void __launch_bounds__(32 * WARPS) column_sums(const ColumnSumsArguments a) {
  __shared__ float of_warps[WARPS][32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int column = blockIdx.x * 32 + lane;
  const float* from = a.from[blockIdx.y];
  float sum = 0.0f;
  if (column < a.columns) {
#pragma unroll 4
    for (int row = warp; row < a.rows; row += WARPS) {
      sum += from[static_cast<long long>(row) * a.columns + column];
    }
  }
  of_warps[warp][lane] = sum;
  __syncthreads();
  if (warp != 0 || column >= a.columns) return;
  for (int other = 1; other < WARPS; ++other) sum += of_warps[other][lane];
  store_number(a.into[blockIdx.y], column, a.kind, sum);
}
