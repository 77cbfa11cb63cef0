// Backward of BatchNorm, ReLU and the addition before it, channels last.
//
//   dy (+ more_dy), or gathered from a pooling's ─┐
//   mask: from x, or the forward's bits ──────────┴─ dz ─┬─ d_residual
//   x ─────────────────── Σ dz, Σ dz·(x − mean) of the block's rows ─ partials ─ barrier ─ of all rows
//       └─ x and dz kept in shared memory as far as it fits ───────────────────┐  └─ d_weight, d_bias
//   dx = scale · (dz − mean of dz − x̂ · mean of dz·x̂) ────────────────────────┘
//
// A second BatchNorm under the same sum (other_x) has the same dz, and gets its gradients too.
//
// After a pooling, a thread handles the four pixels of a 2×2 square together: they share pooling windows.
//
// MASK: 0 no ReLU, 1 recomputed from x, 2 the forward's bits. MORE, KEEP (write d_residual), OTHER, POOL: 0, 1.
#include "batch_norm_common.cuh"

typedef BatchNormBackward Arguments;
// Sums per channel: of dz, of dz·(x − mean), of dz·(other_x − its mean).
enum { kSums = 2 + OTHER, kNorms = 1 + OTHER, kTensors = 2 + OTHER, kLoads = OTHER ? 2 : 4 };

static_assert(!POOL || kLoads == 4, "a thread has a square of pixels at once");

struct Shared {
  float warps[kWarps][kSums][kChannels];
  float groups[kGroups][kSums][kChannels];
  // dx = a·dz + b·(x − mean) + c
  float a[kNorms][kChannels], b[kNorms][kChannels], c[kNorms][kChannels];
};

// Values of a thread's channels that are known before the sums.
struct Known {
  float mean[WIDTH], scale[WIDTH], bias[WIDTH], other_mean[WIDTH];
};

DEVICE void known_channels(const Arguments& a, const Place& p, Known& own) {
  own_of_all(p, a.saved, own.mean);
  if (MASK == 1) {
    own_of_all(p, a.saved + 2 * a.channels, own.scale);
    own_of_all(p, a.saved + 3 * a.channels, own.bias);
  }
  if (OTHER) own_of_all(p, a.other_saved, own.other_mean);
}

// Values loaded for one vector.
struct Read {
  Word x, dy, more, other;
  u32 mask;
};

DEVICE void read(const Arguments& a, u32 at, Read& r) {
  r.x = Pack::load(static_cast<const Word*>(a.x) + at);
  if (!POOL) r.dy = Pack::load(static_cast<const Word*>(a.dy) + at);
  if (MORE) r.more = Pack::load(static_cast<const Word*>(a.more_dy) + at);
  if (OTHER) r.other = Pack::load(static_cast<const Word*>(a.other_x) + at);
  if (MASK == 2) r.mask = a.mask[at];
}

// Loads one byte for each number of a vector.
DEVICE u64 load_places(const u8* from) {
  if (WIDTH == 8) return *reinterpret_cast<const u64*>(from);
  if (WIDTH == 4) return *reinterpret_cast<const u32*>(from);
  return *from;
}

// Row of a thread: its index in x, and whether it exists.
struct Row {
  int number;
  bool exists;
};

// Returns the `u`th of the thread's rows from this step on. After a pooling, rows are counted by squares.
DEVICE Row row_of(const Arguments& a, const Place& p, int step, int u) {
  if (!POOL) {
    const int row = row_at(p, step + u);
    return {row, has(p, row)};
  }
  const int counted = p.first + step * kRowsAStep + p.row * kLoads + u;
  const int square = counted / 4, across = (a.width + 1) / 2, down = (a.height + 1) / 2;
  const int h = 2 * (square / across % down) + u / 2, w = 2 * (square % across) + u % 2;
  const int image = square / across / down;
  return {(image * a.height + h) * a.width + w, has(p, counted) && h < a.height && w < a.width};
}

// Gradients of the 3×3 pooling windows (stride 2, padding 1) that a square of pixels is in, and the positions of
// their maxima.
struct Windows {
  Word dy[4];
  u64 places[4];
};

DEVICE void read_windows(const Arguments& a, const Place& p, int step, Windows& windows) {
  const int counted = p.first + step * kRowsAStep + p.row * kLoads;
  const int square = counted / 4, across = (a.width + 1) / 2, down = (a.height + 1) / 2;
  const int y = square / across % down, x = square % across, image = square / across / down;
#pragma unroll
  for (int k = 0; k < 4; k++) {
    const int in_y = y + k / 2, in_x = x + k % 2;
    windows.places[k] = ~0ull;
    if (!has(p, counted) || in_y >= a.pooled_height || in_x >= a.pooled_width) continue;
    const u32 row = (static_cast<u32>(image) * a.pooled_height + in_y) * a.pooled_width + in_x;
    const u32 at = row * p.vectors + p.vector;
    windows.dy[k] = static_cast<const Word*>(a.dy)[at];
    windows.places[k] = load_places(a.mask + static_cast<u64>(at) * WIDTH);
  }
}

// Gathers the gradient of one of the square's pixels from the windows whose maximum it is.
DEVICE void gather(const Windows& windows, int u, float* d) {
  const int lower = u / 2, right = u % 2;
#pragma unroll
  for (int j = 0; j < WIDTH; j++) d[j] = 0.f;
#pragma unroll
  for (int k = 0; k < 4; k++) {
    // An upper pixel is only in the upper windows, a left one only in the left ones.
    if (k / 2 > lower || k % 2 > right) continue;
    const u32 here = (lower - 2 * (k / 2) + 1) * 3 + right - 2 * (k % 2) + 1;
    float g[WIDTH];
    Pack::unpack(windows.dy[k], g);
#pragma unroll
    for (int j = 0; j < WIDTH; j++) {
      if (((windows.places[k] >> (8 * j)) & 255) == here) d[j] += g[j];
    }
  }
}

// Computes the gradient at the ReLU's input.
DEVICE void under_relu(
    const Known& own, const Read& r, const Windows& windows, int u, const float* x, float* dz) {
  if (POOL) {
    gather(windows, u, dz);
  } else {
    Pack::unpack(r.dy, dz);
  }
  if (MORE) {
    float more[WIDTH];
    Pack::unpack(r.more, more);
#pragma unroll
    for (int j = 0; j < WIDTH; j++) dz[j] += more[j];
  }
#pragma unroll
  for (int j = 0; j < WIDTH; j++) {
    bool passes = true;
    if (MASK == 1) passes = !(fmaf(x[j] - own.mean[j], own.scale[j], own.bias[j]) <= 0.f);
    if (MASK == 2) passes = (r.mask >> j) & 1;
    dz[j] = passes ? dz[j] : 0.f;
  }
  // Rounded as it is stored, so that both parts see the same value.
  Pack::unpack(Pack::pack(dz), dz);
}

DEVICE void add_vector(
    const Known& own, const float* x, const Word& other, const float* dz,
    float (&sums)[kSums][WIDTH]) {
#pragma unroll
  for (int j = 0; j < WIDTH; j++) {
    sums[0][j] += dz[j];
    sums[1][j] = fmaf(dz[j], x[j] - own.mean[j], sums[1][j]);
  }
  if (OTHER) {
    float v[WIDTH];
    Pack::unpack(other, v);
#pragma unroll
    for (int j = 0; j < WIDTH; j++) {
      sums[kSums - 1][j] = fmaf(dz[j], v[j] - own.other_mean[j], sums[kSums - 1][j]);
    }
  }
}

DEVICE void keep(Word* kept, int slots, int step, const Read& r, const Word& dz) {
  *slot_of(kept, slots, 0, step) = r.x;
  *slot_of(kept, slots, 1, step) = dz;
  if (OTHER) *slot_of(kept, slots, kTensors - 1, step) = r.other;
}

DEVICE void thread_sums(
    const Arguments& a, const Place& p, const Known& own, Word* kept, int slots,
    float (&sums)[kSums][WIDTH]) {
#pragma unroll
  for (int k = 0; k < kSums; k++)
#pragma unroll
    for (int j = 0; j < WIDTH; j++) sums[k][j] = 0.f;
  for (int step = 0; step < p.steps; step += kLoads) {
    Read r[kLoads];
    Windows windows;
    if (POOL) read_windows(a, p, step, windows);
#pragma unroll
    for (int u = 0; u < kLoads; u++) {
      const Row row = row_of(a, p, step, u);
      if (row.exists) read(a, index_of(p, row.number), r[u]);
    }
#pragma unroll
    for (int u = 0; u < kLoads; u++) {
      const Row row = row_of(a, p, step, u);
      if (!row.exists) continue;
      float x[WIDTH], dz[WIDTH];
      Pack::unpack(r[u].x, x);
      under_relu(own, r[u], windows, u, x, dz);
      add_vector(own, x, r[u].other, dz, sums);
      const Word packed = Pack::pack(dz);
      if (KEEP) static_cast<Word*>(a.d_residual)[index_of(p, row.number)] = packed;
      if (step + u < slots) keep(kept, slots, step + u, r[u], packed);
    }
  }
}

DEVICE void first_half(
    const Arguments& a, const Place& p, const Known& own, Shared& s, Word* kept, int slots) {
  float sums[kSums][WIDTH];
  thread_sums(a, p, own, kept, slots, sums);
#pragma unroll
  for (int k = 0; k < kSums; k++)
#pragma unroll
    for (int j = 0; j < WIDTH; j++) {
#pragma unroll
      for (int across = LANES; across < 32; across <<= 1) sums[k][j] += from_lane(sums[k][j], across);
      if (threadIdx.x % 32 < LANES) s.warps[threadIdx.x / 32][k][p.lane * WIDTH + j] = sums[k][j];
    }
  __syncthreads();
  float* partials = a.partials + partials_at(p, p.block, kSums);
  for (int i = threadIdx.x; i < kSums * kChannels; i += THREADS) {
    float sum = 0.f;
    for (int w = 0; w < kWarps; w++) sum += s.warps[w][i / kChannels][i % kChannels];
    partials[i] = sum;
  }
}

// Computes the sums over all rows, in the first kChannels threads.
DEVICE void all_sums(const Arguments& a, const Place& p, Shared& s, float (&sums)[kSums]) {
  const int c = threadIdx.x % kChannels;
  const int group = threadIdx.x / kChannels;
#pragma unroll
  for (int k = 0; k < kSums; k++) sums[k] = 0.f;
#pragma unroll 4
  for (int b = group; b < p.blocks; b += kGroups) {
    const float* partials = a.partials + partials_at(p, b, kSums) + c;
#pragma unroll
    for (int k = 0; k < kSums; k++) sums[k] += load_shared_by_blocks(partials + k * kChannels);
  }
#pragma unroll
  for (int k = 0; k < kSums; k++) s.groups[group][k][c] = sums[k];
  __syncthreads();
  if (threadIdx.x >= kChannels) return;
  const int used = p.blocks < kGroups ? p.blocks : kGroups;
  for (int g = 1; g < used; g++)
#pragma unroll
    for (int k = 0; k < kSums; k++) sums[k] += s.groups[g][k][c];
}

// Forward's values of a channel, in the first kChannels threads; loaded before the barrier, which hides the
// latency.
struct Channel {
  int number;
  bool inside;
  float deviation[kNorms], scale[kNorms];
};

DEVICE Channel known_channel(const Arguments& a, const Place& p) {
  Channel c;
  c.number = p.slice * kChannels + threadIdx.x;
  c.inside = threadIdx.x < kChannels && c.number < a.channels;
  if (!c.inside) return c;
#pragma unroll
  for (int norm = 0; norm < kNorms; norm++) {
    const float* saved = norm ? a.other_saved : a.saved;
    c.deviation[norm] = saved[a.channels + c.number];
    c.scale[norm] = saved[2 * a.channels + c.number];
  }
  return c;
}

// Computes one BatchNorm's coefficients, and the gradients of its weight and bias.
DEVICE void finish_norm(
    const Arguments& a, const Place& p, Shared& s, const Channel& known, int norm, float sum,
    float product) {
  const int channel = known.number;
  const float deviation = known.deviation[norm], scale = known.scale[norm];
  const float share = a.training ? 1.f / a.count : 0.f;
  s.a[norm][threadIdx.x] = scale;
  s.b[norm][threadIdx.x] = -scale * deviation * deviation * product * share;
  s.c[norm][threadIdx.x] = -scale * sum * share;
  if (p.block != 0) return;
  void* d_weight = norm ? a.other_d_weight : a.d_weight;
  void* d_bias = norm ? a.other_d_bias : a.d_bias;
  const int kind = norm ? a.other_weight_kind : a.weight_kind;
  if (d_weight != nullptr) store_number(d_weight, channel, kind, product * deviation);
  if (d_bias != nullptr) store_number(d_bias, channel, kind, sum);
}

DEVICE void finish(const Arguments& a, const Place& p, Shared& s, const Channel& c) {
  float sums[kSums];
  // With fixed statistics and no weight gradient wanted, there are no sums.
  if (PASS != FIXED) {
    all_sums(a, p, s, sums);
  } else {
#pragma unroll
    for (int k = 0; k < kSums; k++) sums[k] = 0.f;
  }
  if (!c.inside) return;
  finish_norm(a, p, s, c, 0, sums[0], sums[1]);
  if (OTHER) finish_norm(a, p, s, c, kNorms - 1, sums[0], sums[kSums - 1]);
}

// Writes one vector of a BatchNorm's dx.
DEVICE void write_dx(
    const Place& p, const Shared& s, int norm, const Word& x, const float* mean, const float* dz,
    Word* dx) {
  float v[WIDTH], a[WIDTH], b[WIDTH], c[WIDTH];
  own_channels(p, s.a[norm], a);
  own_channels(p, s.b[norm], b);
  own_channels(p, s.c[norm], c);
  Pack::unpack(x, v);
#pragma unroll
  for (int j = 0; j < WIDTH; j++) v[j] = fmaf(a[j], dz[j], fmaf(b[j], v[j] - mean[j], c[j]));
  *dx = Pack::pack(v);
}

// Reads a vector again: from shared memory if it is kept there, else from global memory. Puts dz into `r.dy` if the
// first part has stored it, in shared memory or (`has_left`) in d_residual; else reads all that dz is computed from.
DEVICE void read_again(
    const Arguments& a, u32 at, Word* kept, int slots, int step, bool has_left, Read& r) {
  if (step < slots) {
    r.x = *slot_of(kept, slots, 0, step);
    r.dy = *slot_of(kept, slots, 1, step);
    if (OTHER) r.other = *slot_of(kept, slots, kTensors - 1, step);
  } else if (has_left) {
    r.x = Pack::load(static_cast<const Word*>(a.x) + at);
    r.dy = Pack::load(static_cast<const Word*>(a.d_residual) + at);
    if (OTHER) r.other = Pack::load(static_cast<const Word*>(a.other_x) + at);
  } else {
    read(a, at, r);
  }
}

DEVICE void second_half(
    const Arguments& a, const Place& p, const Known& own, const Shared& s, Word* kept, int slots) {
  const bool has_left = KEEP && PASS != FIXED;
  const int blocks_of_steps = (p.steps + kLoads - 1) / kLoads;
  for (int step = (blocks_of_steps - 1) * kLoads; step >= 0; step -= kLoads) {
    Read r[kLoads];
    Windows windows;
    if (POOL && step + kLoads > slots) read_windows(a, p, step, windows);
#pragma unroll
    for (int u = 0; u < kLoads; u++) {
      const Row row = row_of(a, p, step, u);
      if (!row.exists) continue;
      read_again(a, index_of(p, row.number), kept, slots, step + u, has_left, r[u]);
    }
#pragma unroll
    for (int u = 0; u < kLoads; u++) {
      const Row row = row_of(a, p, step, u);
      if (!row.exists) continue;
      const u32 at = index_of(p, row.number);
      float dz[WIDTH];
      if (has_left || step + u < slots) {
        Pack::unpack(r[u].dy, dz);
      } else {
        float x[WIDTH];
        Pack::unpack(r[u].x, x);
        under_relu(own, r[u], windows, u, x, dz);
        if (KEEP) static_cast<Word*>(a.d_residual)[at] = Pack::pack(dz);
      }
      write_dx(p, s, 0, r[u].x, own.mean, dz, static_cast<Word*>(a.dx) + at);
      if (OTHER) {
        write_dx(
            p, s, kNorms - 1, r[u].other, own.other_mean, dz, static_cast<Word*>(a.other_dx) + at);
      }
    }
  }
}

KERNEL void __launch_bounds__(THREADS, 1) batch_norm_backward(const Arguments a) {
  SHARED_WORDS(words);
  Shared& s = *reinterpret_cast<Shared*>(words);
  Word* kept = reinterpret_cast<Word*>(words + (sizeof(Shared) + 15) / 16);
  const Place p = place(a);
  const int slots = PASS == WHOLE ? a.slots : 0;
  Known own;
  known_channels(a, p, own);
  if (PASS == FIRST_HALF || PASS == WHOLE) first_half(a, p, own, s, kept, slots);
  const Channel channel = known_channel(a, p);
  if (PASS == WHOLE) grid_barrier();
  if (PASS == FIRST_HALF) return;
  finish(a, p, s, channel);
  __syncthreads();
  second_half(a, p, own, s, kept, slots);
}
