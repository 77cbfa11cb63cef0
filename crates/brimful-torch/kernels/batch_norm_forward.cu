// BatchNorm, ReLU and an addition before it, channels last.
//
//   x ──┬─ mean, variance of the block's rows ─ partials ─ barrier ─ of all rows ─┬─ saved, running
//       └─ kept in shared memory as far as it fits ──────────────────────────────┐│
//   residual ────────────────────────────────────────────── y = ReLU(x̂·w + b + residual), mask
//
// The second part goes through the rows backwards: the last ones read are still in the cache. Means and squared
// deviations are merged by Chan's formula in a fixed order: nothing cancels, and results are deterministic. Until
// the end, means are relative to the channel's first number: near 10,000 an f32 would lose the third decimal.
//
// RELU: 0, 1. RESIDUAL: 0 none, 1 as it is, 2 through its own BatchNorm with known statistics.
#include "batch_norm_common.cuh"

typedef BatchNormForward Arguments;
enum { kLoads = 8, kApplied = 4 };

// Moments of `n` numbers: their mean and squared deviations from it.
struct Moments {
  float n, mean, squares;
};

DEVICE void merge(Moments& into, float n, float mean, float squares) {
  if (n == 0.f) return;
  const float total = into.n + n;
  const float part = __fdividef(n, total);
  const float away = mean - into.mean;
  into.mean = fmaf(away, part, into.mean);
  into.squares += fmaf(away * away * into.n, part, squares);
  into.n = total;
}

struct Shared {
  float warps[kWarps][2][kChannels];
  float groups[kGroups][2][kChannels];
  float counts[THREADS];
  float mean[kChannels], scale[kChannels], bias[kChannels];
};

// Moments of a thread's channels, which share one count.
struct ThreadMoments {
  float n, mean[WIDTH], squares[WIDTH];
};

// Computes the moments of the thread's own rows, summed relative to its first number.
DEVICE void thread_moments(
    const Arguments& a, const Place& p, Word* kept, int slots, ThreadMoments& own) {
  const Word* x = static_cast<const Word*>(a.x);
  float shift[WIDTH], sum[WIDTH], squares[WIDTH];
  int count = 0;
#pragma unroll
  for (int j = 0; j < WIDTH; j++) shift[j] = sum[j] = squares[j] = 0.f;
  if (has(p, row_at(p, 0))) Pack::unpack(Pack::load(x + index_of(p, row_at(p, 0))), shift);
  for (int step = 0; step < p.steps; step += kLoads) {
    Word words[kLoads];
#pragma unroll
    for (int u = 0; u < kLoads; u++) {
      const int row = row_at(p, step + u);
      if (has(p, row)) words[u] = Pack::load(x + index_of(p, row));
    }
#pragma unroll
    for (int u = 0; u < kLoads; u++) {
      if (!has(p, row_at(p, step + u))) continue;
      if (step + u < slots) *slot_of(kept, slots, 0, step + u) = words[u];
      float v[WIDTH];
      Pack::unpack(words[u], v);
      count++;
#pragma unroll
      for (int j = 0; j < WIDTH; j++) {
        const float d = v[j] - shift[j];
        sum[j] += d;
        squares[j] = fmaf(d, d, squares[j]);
      }
    }
  }
  float first[WIDTH];
  if (p.inside) Pack::unpack(Pack::load(x + p.vector), first);
#pragma unroll
  for (int j = 0; j < WIDTH; j++) {
    const float mean = count > 0 ? sum[j] / count : 0.f;
    const float around = squares[j] - sum[j] * mean;
    own.mean[j] = shift[j] - first[j] + mean;
    // The comparison is `<`, so that a NaN is kept.
    own.squares[j] = around < 0.f ? 0.f : around;
  }
  own.n = count;
}

// Merges the rows of a warp into its first lanes.
DEVICE void warp_moments(ThreadMoments& own) {
#pragma unroll
  for (int across = LANES; across < 32; across <<= 1) {
    const float n = from_lane(own.n, across);
    const float total = own.n + n;
    const float part = total > 0.f ? __fdividef(n, total) : 0.f;
#pragma unroll
    for (int j = 0; j < WIDTH; j++) {
      const float away = from_lane(own.mean[j], across) - own.mean[j];
      own.squares[j] += fmaf(away * away * own.n, part, from_lane(own.squares[j], across));
      own.mean[j] = fmaf(away, part, own.mean[j]);
    }
    own.n = total;
  }
}

// Merges a block's threads; the result is in the first kChannels threads.
DEVICE Moments block_moments(const Place& p, Shared& s, ThreadMoments& own) {
  warp_moments(own);
  const int warp = threadIdx.x / 32;
  if (threadIdx.x % 32 < LANES) {
#pragma unroll
    for (int j = 0; j < WIDTH; j++) {
      s.warps[warp][0][p.lane * WIDTH + j] = own.mean[j];
      s.warps[warp][1][p.lane * WIDTH + j] = own.squares[j];
    }
  }
  if (threadIdx.x % 32 == 0) s.counts[warp] = own.n;
  __syncthreads();
  Moments all = {0.f, 0.f, 0.f};
  const int c = threadIdx.x;
  if (c < kChannels) {
#pragma unroll 4
    for (int w = 0; w < kWarps; w++) merge(all, s.counts[w], s.warps[w][0][c], s.warps[w][1][c]);
  }
  return all;
}

DEVICE void first_half(const Arguments& a, const Place& p, Shared& s, Word* kept, int slots) {
  ThreadMoments own;
  thread_moments(a, p, kept, slots, own);
  // A slice's first lane is always inside, so its count is that of the block's rows.
  const Moments all = block_moments(p, s, own);
  float* partials = a.partials + partials_at(p, p.block, 2);
  if (threadIdx.x < kChannels) {
    partials[threadIdx.x] = all.mean;
    partials[kChannels + threadIdx.x] = all.squares;
  }
}

// Merges the blocks' partials into the moments of all rows, in the first kChannels threads.
DEVICE Moments all_moments(const Arguments& a, const Place& p, Shared& s) {
  const int c = threadIdx.x % kChannels;
  const int group = threadIdx.x / kChannels;
  Moments all = {0.f, 0.f, 0.f};
#pragma unroll 4
  for (int b = group; b < p.blocks && group < kGroups; b += kGroups) {
    const float* partials = a.partials + partials_at(p, b, 2) + c;
    const float mean = load_shared_by_blocks(partials);
    const float squares = load_shared_by_blocks(partials + kChannels);
    merge(all, rows_of(b, a.chunk, a.rows), mean, squares);
  }
  __syncthreads();
  if (group < kGroups) {
    s.groups[group][0][c] = all.mean;
    s.groups[group][1][c] = all.squares;
    s.counts[group] = all.n;
  }
  __syncthreads();
  if (threadIdx.x >= kChannels) return all;
  const int used = p.blocks < kGroups ? p.blocks : kGroups;
  for (int g = 1; g < used; g++) merge(all, s.counts[g], s.groups[g][0][c], s.groups[g][1][c]);
  return all;
}

// Updates the running statistics as libtorch does, towards the unbiased variance.
DEVICE void move_running(const Arguments& a, int channel, const Moments& all) {
  if (a.running_mean == nullptr) return;
  const float mean = load_number(a.running_mean, channel, a.running_kind);
  const float variance = load_number(a.running_variance, channel, a.running_kind);
  const float stay = 1.f - a.momentum;
  const float unbiased = all.squares / (all.n - 1.f);
  store_number(a.running_mean, channel, a.running_kind, stay * mean + a.momentum * all.mean);
  store_number(
      a.running_variance, channel, a.running_kind, stay * variance + a.momentum * unbiased);
}

// Values of a channel known before its moments, in the first kChannels threads; loaded before the barrier, which
// hides the latency.
struct Channel {
  int number;
  bool inside;
  float first, weight, bias;
};

DEVICE Channel known_channel(const Arguments& a, const Place& p) {
  Channel c;
  c.number = p.slice * kChannels + threadIdx.x;
  c.inside = threadIdx.x < kChannels && c.number < a.channels;
  if (!c.inside) return c;
  c.first = KIND::widen(static_cast<const KIND::Number*>(a.x)[c.number]);
  c.weight = a.weight == nullptr ? 1.f : load_number(a.weight, c.number, a.weight_kind);
  c.bias = a.bias == nullptr ? 0.f : load_number(a.bias, c.number, a.weight_kind);
  return c;
}

// Stores a channel's coefficients in shared memory, and for the backward.
DEVICE void coefficients(
    const Arguments& a, const Place& p, Shared& s, const Channel& c, float mean, float variance) {
  const float deviation = 1.f / sqrtf(variance + a.eps);
  s.mean[threadIdx.x] = mean;
  s.scale[threadIdx.x] = c.weight * deviation;
  s.bias[threadIdx.x] = c.bias;
  if (p.block != 0 || a.saved == nullptr) return;
  a.saved[c.number] = mean;
  a.saved[a.channels + c.number] = deviation;
  a.saved[2 * a.channels + c.number] = c.weight * deviation;
  a.saved[3 * a.channels + c.number] = c.bias;
}

DEVICE void finish(const Arguments& a, const Place& p, Shared& s, const Channel& c) {
  Moments all = all_moments(a, p, s);
  if (!c.inside) return;
  all.mean += c.first;
  if (PASS == MOMENTS || PASS == FINISH_MOMENTS) {
    a.saved[c.number] = all.mean;
    a.saved[a.channels + c.number] = all.squares / all.n;
    return;
  }
  coefficients(a, p, s, c, all.mean, all.squares / all.n);
  if (p.block == 0) move_running(a, c.number, all);
}

// Uses the running statistics, in evaluation.
DEVICE void take_running(const Arguments& a, const Place& p, Shared& s, const Channel& c) {
  if (!c.inside) return;
  coefficients(
      a, p, s, c, load_number(a.running_mean, c.number, a.running_kind),
      load_number(a.running_variance, c.number, a.running_kind));
}

// Coefficients of each of a thread's channels.
struct Applied {
  float mean[WIDTH], scale[WIDTH], bias[WIDTH];
  float other_mean[WIDTH], other_scale[WIDTH];
};

DEVICE void own_coefficients(const Arguments& a, const Place& p, const Shared& s, Applied& own) {
  own_channels(p, s.mean, own.mean);
  own_channels(p, s.scale, own.scale);
  own_channels(p, s.bias, own.bias);
  if (RESIDUAL != 2) return;
  float bias[WIDTH];
  own_of_all(p, a.residual_saved, own.other_mean);
  own_of_all(p, a.residual_saved + 2 * a.channels, own.other_scale);
  own_of_all(p, a.residual_saved + 3 * a.channels, bias);
#pragma unroll
  for (int j = 0; j < WIDTH; j++) own.bias[j] += bias[j];
}

// Computes one vector of the output; returns its mask.
DEVICE u32 apply(const Applied& own, const Word& x, const Word& residual, Word* y) {
  float v[WIDTH], r[WIDTH];
  u32 mask = 0;
  Pack::unpack(x, v);
  if (RESIDUAL) Pack::unpack(residual, r);
#pragma unroll
  for (int j = 0; j < WIDTH; j++) {
    v[j] = fmaf(v[j] - own.mean[j], own.scale[j], own.bias[j]);
    if (RESIDUAL == 1) v[j] += r[j];
    if (RESIDUAL == 2) v[j] = fmaf(r[j] - own.other_mean[j], own.other_scale[j], v[j]);
    // A NaN passes, as in libtorch.
    const bool passes = !RELU || !(v[j] <= 0.f);
    mask |= (passes ? 1u : 0u) << j;
    v[j] = passes ? v[j] : 0.f;
  }
  *y = Pack::pack(v);
  return mask;
}

DEVICE void second_half(const Arguments& a, const Place& p, const Shared& s, Word* kept, int slots) {
  const Word* x = static_cast<const Word*>(a.x);
  const Word* residual = static_cast<const Word*>(a.residual);
  Word* y = static_cast<Word*>(a.y);
  Applied own;
  own_coefficients(a, p, s, own);
  const int blocks_of_steps = (p.steps + kApplied - 1) / kApplied;
  for (int step = (blocks_of_steps - 1) * kApplied; step >= 0; step -= kApplied) {
    Word words[kApplied], beside[kApplied];
#pragma unroll
    for (int u = 0; u < kApplied; u++) {
      const int row = row_at(p, step + u);
      if (!has(p, row)) continue;
      words[u] = step + u < slots ? *slot_of(kept, slots, 0, step + u)
                                  : Pack::load(x + index_of(p, row));
      if (RESIDUAL) beside[u] = Pack::load(residual + index_of(p, row));
    }
#pragma unroll
    for (int u = 0; u < kApplied; u++) {
      const int row = row_at(p, step + u);
      if (!has(p, row)) continue;
      const u32 at = index_of(p, row);
      const u32 mask = apply(own, words[u], beside[u], y + at);
      if (RELU && RESIDUAL && a.mask != nullptr) a.mask[at] = static_cast<u8>(mask);
    }
  }
}

KERNEL void __launch_bounds__(THREADS, 1) batch_norm_forward(const Arguments a) {
  SHARED_WORDS(words);
  Shared& s = *reinterpret_cast<Shared*>(words);
  Word* kept = reinterpret_cast<Word*>(words + (sizeof(Shared) + 15) / 16);
  const Place p = place(a);
  const int slots = PASS == WHOLE ? a.slots : 0;
  const bool found_alone = PASS == STATISTICS || PASS == MOMENTS;
  if (PASS == FIRST_HALF || PASS == WHOLE || found_alone) first_half(a, p, s, kept, slots);
  const Channel channel = known_channel(a, p);
  if (PASS == WHOLE || found_alone) grid_barrier();
  if (found_alone && p.block != 0) return;
  if (PASS == FIXED) {
    take_running(a, p, s, channel);
  } else if (PASS != FIRST_HALF) {
    finish(a, p, s, channel);
  }
  __syncthreads();
  if (PASS == WHOLE || PASS == SECOND_HALF || PASS == FIXED) second_half(a, p, s, kept, slots);
}
