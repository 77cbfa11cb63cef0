// Max pooling of 3×3, stride 2, padding 1 over ReLU(BatchNorm(x)), channels last, with known statistics; the
// intermediate results are not written.
//
//   x  ·  ·  ·  ·  ·        a thread computes one vector of channels of one output pixel: it reads nine
//      · [·  ·  ·] ·        of x, and writes the largest and its position in the window, 0 to 8, the
//      · [·  ·  ·] ·        first one if several are equal
//      · [·  ·  ·] ·
#include "prelude.cuh"
#include "batch_norm_arguments.h"

typedef Packed<KIND, WIDTH> Pack;
typedef Pack::Word Word;
typedef BatchNormPool Arguments;

DEVICE void channel_row(const float* of_all, u32 vector, float* out) {
#pragma unroll
  for (int j = 0; j < WIDTH; j++) out[j] = of_all[vector * WIDTH + j];
}

// Stores the positions of a vector's maxima at once.
DEVICE void store_places(u8* to, const u8* place) {
  u64 all = 0;
#pragma unroll
  for (int j = 0; j < WIDTH; j++) all |= static_cast<u64>(place[j]) << (8 * j);
  if (WIDTH == 8) *reinterpret_cast<u64*>(to) = all;
  if (WIDTH == 4) *reinterpret_cast<u32*>(to) = static_cast<u32>(all);
  if (WIDTH == 1) *to = static_cast<u8>(all);
}

KERNEL void __launch_bounds__(256) batch_norm_pool(const Arguments a) {
  const u32 i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= static_cast<u32>(a.total)) return;
  const u32 vectors = a.channels / WIDTH, vector = i % vectors;
  const u32 out = i / vectors;
  const int x = out % a.pooled_width, y = out / a.pooled_width % a.pooled_height;
  const u32 n = out / a.pooled_width / a.pooled_height;
  float mean[WIDTH], scale[WIDTH], bias[WIDTH], best[WIDTH];
  u8 place[WIDTH];
  channel_row(a.saved, vector, mean);
  channel_row(a.saved + 2 * a.channels, vector, scale);
  channel_row(a.saved + 3 * a.channels, vector, bias);
#pragma unroll
  for (int j = 0; j < WIDTH; j++) best[j] = -1.f, place[j] = 0;
#pragma unroll
  for (int k = 0; k < 9; k++) {
    const int h = 2 * y - 1 + k / 3, w = 2 * x - 1 + k % 3;
    if (h < 0 || h >= a.height || w < 0 || w >= a.width) continue;
    const u32 at = ((n * a.height + h) * a.width + w) * vectors + vector;
    float v[WIDTH];
    Pack::unpack(static_cast<const Word*>(a.x)[at], v);
#pragma unroll
    for (int j = 0; j < WIDTH; j++) {
      v[j] = fmaf(v[j] - mean[j], scale[j], bias[j]);
      v[j] = v[j] <= 0.f ? 0.f : v[j];
    }
    // Compared as rounded for storage; a NaN wins, as in libtorch.
    Pack::unpack(Pack::pack(v), v);
#pragma unroll
    for (int j = 0; j < WIDTH; j++) {
      if (v[j] > best[j] || v[j] != v[j]) best[j] = v[j], place[j] = k;
    }
  }
  static_cast<Word*>(a.y)[i] = Pack::pack(best);
  store_places(a.place + static_cast<u64>(i) * WIDTH, place);
}
