// Adds half-precision numbers to f32 sums, for many tensors in one launch: one row of blocks per tensor, eight
// numbers per thread at a time.
//
//   from ──▶ widened ─┐
//   into ─────────────┴─▶ added ──▶ into
//
// The remainder at a tensor's end is added one by one.

#include "prelude.cuh"
#include "add_halves_arguments.h"

// Defined outside: KIND.
#define THREADS 256

typedef Packed<KIND, 8> Words;
typedef Packed<F32, 4> Sums;

KERNEL void __launch_bounds__(THREADS) add_halves(const AddHalvesArguments a) {
  const auto* from = static_cast<const KIND::Number*>(a.from[blockIdx.y]);
  float* into = a.into[blockIdx.y];
  const long long words = a.count[blockIdx.y] / 8;
  const long long first = static_cast<long long>(blockIdx.x) * THREADS + threadIdx.x;
  const long long step = static_cast<long long>(gridDim.x) * THREADS;
  for (long long i = first; i < words; i += step) {
    float added[8], sum[8];
    uint4* sums = reinterpret_cast<uint4*>(into) + 2 * i;
    const uint4 word = Words::load(reinterpret_cast<const uint4*>(from) + i);
    const uint4 low = sums[0], high = sums[1];
    Words::unpack(word, added);
    Sums::unpack(low, sum);
    Sums::unpack(high, sum + 4);
    for (int k = 0; k < 8; ++k) sum[k] += added[k];
    sums[0] = Sums::pack(sum);
    sums[1] = Sums::pack(sum + 4);
  }
  const long long rest = words * 8 + first;
  if (rest < a.count[blockIdx.y]) into[rest] += KIND::widen(from[rest]);
}
