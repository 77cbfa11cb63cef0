// Fills memory with a pattern of four bytes, sixteen bytes per thread at a time; the remainder byte by byte.

#include "prelude.cuh"
#include "fill_arguments.h"

#define THREADS 256

KERNEL void __launch_bounds__(THREADS) fill(const FillArguments a) {
  const u64 words = a.bytes / 16;
  const u64 first = static_cast<u64>(blockIdx.x) * THREADS + threadIdx.x;
  const uint4 word = make_uint4(a.pattern, a.pattern, a.pattern, a.pattern);
  for (u64 i = first; i < words; i += static_cast<u64>(gridDim.x) * THREADS) {
    static_cast<uint4*>(a.into)[i] = word;
  }
  const u64 rest = words * 16 + first;
  if (rest < a.bytes) static_cast<u8*>(a.into)[rest] = static_cast<u8>(a.pattern >> (rest % 4 * 8));
}
