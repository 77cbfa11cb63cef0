// What kernels share that go down strips of 32 words: a lane its word, warps take turns with rows.
#pragma once

// Adds what the block's warps have of a strip, in their order, into a row of partial sums.
template <int Warps, int Numbers>
DEVICE void store_strip(float* row, int columns, const float* sums) {
  __shared__ float of_warps[Warps][32 * Numbers];
  // Others may still read what an earlier call left.
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
