// Out-of-place Adam on the host, in one pass:
//
//   parameter · gradient · average · square  ──▶  a block in the first cache  ──▶  parameter' · average' · square'
//
// Results bypass the caches: they are not read soon, and a cached store would first fetch its line. Rounding
// matches libtorch's fused kernel operation by operation, so this file is compiled without contractions, and for
// wide registers where the machine has them.

#include "host_adam.h"

#include <cmath>
#include <cstring>

#if defined(__x86_64__)
#include <emmintrin.h>
#define BRIMFUL_WIDE __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define BRIMFUL_WIDE
#endif

namespace {

using brimful::HostAdam;
using brimful::HostAdamPlaces;

// Three blocks of 1,024 floats are 12 KiB.
constexpr int64_t kBlock = 1024;

struct Block {
  alignas(64) float parameter[kBlock];
  alignas(64) float average[kBlock];
  alignas(64) float square[kBlock];
};

BRIMFUL_WIDE void compute(
    const float* __restrict parameter, const float* __restrict gradient,
    const float* __restrict average, const float* __restrict square, Block& __restrict to,
    int64_t count, const HostAdam& adam) {
  const HostAdam a = adam;
  for (int64_t i = 0; i < count; ++i) {
    const float g = a.decay == 0 ? gradient[i] : std::fma(parameter[i], a.decay, gradient[i]);
    const float first = std::fma(a.average_share, g - average[i], average[i]);
    const float second = std::fma(a.square_share * g, g, square[i] * a.square_left);
    to.average[i] = first;
    to.square[i] = second;
    to.parameter[i] =
        parameter[i] * a.shrink - a.step_size * first / (std::sqrt(second) / a.correction + a.eps);
  }
}

void store(float* to, const float* block, int64_t count) {
  int64_t done = 0;
#if defined(__x86_64__)
  // Streaming stores need aligned registers, but a thread's share may begin unaligned.
  constexpr int64_t kRegister = 4;
  const auto is_aligned = [&] { return reinterpret_cast<uintptr_t>(to + done) % sizeof(__m128) == 0; };
  for (; done < count && !is_aligned(); ++done) to[done] = block[done];
  for (; done + kRegister <= count; done += kRegister) {
    _mm_stream_ps(to + done, _mm_loadu_ps(block + done));
  }
#endif
  std::memcpy(to + done, block + done, (count - done) * sizeof(float));
}

}  // namespace

void brimful::host_adam(
    HostAdamPlaces<const float> from, const float* gradient, HostAdamPlaces<float> to,
    int64_t count, const HostAdam& adam) {
  Block block;
  for (int64_t at = 0; at < count; at += kBlock) {
    const int64_t here = count - at < kBlock ? count - at : kBlock;
    compute(
        from.parameter + at, gradient + at, from.average + at, from.square + at, block, here, adam);
    store(to.parameter + at, block.parameter, here);
    store(to.average + at, block.average, here);
    store(to.square + at, block.square, here);
  }
#if defined(__x86_64__)
  // Makes the streaming stores visible to other threads.
  _mm_sfence();
#endif
}
