// Shared by kernels that go down strips of 32 words: one word per lane, warps alternate over the rows.
#pragma once

// Adds the warps' sums of a strip, in their order, into a row of partial sums.
template <int Warps, int Numbers>
DEVICE void store_strip(float* row, int columns, const float* sums) {
  __shared__ float of_warps[Warps][32 * Numbers];
  // Other threads may still read an earlier call's values.
  __syncthreads();
  for (int k = 0; k < Numbers; ++k) {
    of_warps[threadIdx.x / 32][threadIdx.x % 32 * Numbers + k] = sums[k];
  }
  __syncthreads();
  for (int i = threadIdx.x; i < 32 * Numbers; i += 32 * Warps) {
    const int column = blockIdx.x * 32 * Numbers + i;
    if (column >= columns) continue;
    float sum = 0.0f;
    for (int warp = 0; warp < Warps; ++warp) sum += of_warps[warp][i];
    row[column] = sum;
  }
}
