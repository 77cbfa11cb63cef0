// Partial column sums over blocks of rows, which kernels/column_sums.cu adds up: a bias's gradient. A block takes
// a strip of 32 words and some of its rows:
//
//   from [rows × columns] ──▶ added up over a warp's rows ──▶ warps in their order ──▶ one row a row block

#include "prelude.cuh"
#include "strip.cuh"
#include "column_partials_arguments.h"

// Defined outside: KIND and PER_WORD (numbers a word).
#define WARPS 8

typedef Packed<KIND, PER_WORD> Words;

KERNEL void __launch_bounds__(32 * WARPS) column_partials(const ColumnPartialsArguments a) {
  const int words = a.columns / PER_WORD;
  const int column = blockIdx.x * 32 + threadIdx.x % 32;
  const Words::Word* from = static_cast<const Words::Word*>(a.from) + column;
  const long long first = blockIdx.y * a.rows_of_block;
  const long long end = first + a.rows_of_block < a.rows ? first + a.rows_of_block : a.rows;
  float sums[PER_WORD] = {};
#pragma unroll 4
  for (long long row = first + threadIdx.x / 32; row < end && column < words; row += WARPS) {
    float numbers[PER_WORD];
    Words::unpack(from[row * words], numbers);
    for (int k = 0; k < PER_WORD; ++k) sums[k] += numbers[k];
  }
  float* into = a.into + static_cast<long long>(blockIdx.y) * a.columns;
  store_strip<WARPS, PER_WORD>(into, a.columns, sums);
}
