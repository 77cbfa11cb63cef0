// LayerNorm and RMSNorm of rows, with a fused addition, forward and backward. One team of threads per row (a
// warp, or a whole block for wide rows), each thread with HELD of its words in registers:
//
//   forward    x ─┬─ + residual ─▶ sum ─▶ mean, scale ─▶ (sum − mean) · scale · weight + bias ─▶ out
//   backward   gradient, sum ─▶ two sums over the row ─▶ gradient of the sum (+ that of its other uses)
//                   └─ every thread adds up its columns over the rows of its team ─▶ teams of the block
//                      ─▶ one row of partial sums a block, which kernels/column_sums.cu adds up
//
// Rows are assigned to teams by index, and sums follow the order of lanes, warps and rows, so results are
// deterministic. Statistics are computed from registers in two passes, so that large means do not cancel.

#include "prelude.cuh"
#include "norm_arguments.h"

// Defined outside: KIND and PER_WORD (numbers a word), TEAM (threads a row: 32, or THREADS), HELD (words a
// thread).
#define THREADS 256
#define WARPS (THREADS / 32)
#define TEAMS (THREADS / TEAM)
#define HELD_NUMBERS (HELD * PER_WORD)
// True if a backward's registers have space for the next row beside the present one.
#define READS_AHEAD (HELD <= 3)

typedef Packed<KIND, PER_WORD> Words;

// Returns the sum over a team, in each of its threads. `turn` selects one of the block's two buffers, so that
// consecutive sums use different ones.
DEVICE float team_sum(float v, int turn) {
  v = warp_sum(v);
  if (TEAM == 32) return v;
  __shared__ float of_warps[2][WARPS];
  if (threadIdx.x % 32 == 0) of_warps[turn % 2][threadIdx.x / 32] = v;
  __syncthreads();
  v = 0.0f;
  for (int warp = 0; warp < WARPS; ++warp) v += of_warps[turn % 2][warp];
  return v;
}

// Returns the index of a thread's word in a row.
DEVICE int word_of(int held) { return held * TEAM + threadIdx.x % TEAM; }

DEVICE void load_row(const void* from, long long row, int words, float* out) {
  const Words::Word* all = static_cast<const Words::Word*>(from) + row * words;
#pragma unroll
  for (int h = 0; h < HELD; ++h) {
    float* numbers = out + h * PER_WORD;
    if (word_of(h) < words) {
      Words::unpack(all[word_of(h)], numbers);
    } else {
      for (int k = 0; k < PER_WORD; ++k) numbers[k] = 0.0f;
    }
  }
}

DEVICE void store_row(void* into, long long row, int words, const float* in) {
  Words::Word* all = static_cast<Words::Word*>(into) + row * words;
#pragma unroll
  for (int h = 0; h < HELD; ++h) {
    if (word_of(h) < words) all[word_of(h)] = Words::pack(in + h * PER_WORD);
  }
}

// Rounds the numbers to the dtype in which they are stored.
DEVICE void round_row(float* x) {
#pragma unroll
  for (int h = 0; h < HELD; ++h) Words::unpack(Words::pack(x + h * PER_WORD), x + h * PER_WORD);
}

KERNEL void __launch_bounds__(THREADS) norm_forward(const NormForwardArguments a) {
  const long long row = static_cast<long long>(blockIdx.x) * TEAMS + threadIdx.x / TEAM;
  if (row >= a.rows) return;
  const int words = a.width / PER_WORD;
  float x[HELD_NUMBERS], other[HELD_NUMBERS];
  load_row(a.x, row, words, x);
  if (a.residual != nullptr) {
    load_row(a.residual, row, words, other);
#pragma unroll
    for (int i = 0; i < HELD_NUMBERS; ++i) x[i] += other[i];
    round_row(x);
    store_row(a.sum, row, words, x);
  }
  float mean = 0.0f;
  if (a.mean != nullptr) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < HELD_NUMBERS; ++i) sum += x[i];
    mean = team_sum(sum, 0) / a.width;
  }
  float squares = 0.0f;
#pragma unroll
  for (int h = 0; h < HELD; ++h) {
    if (word_of(h) >= words) continue;
    for (int k = 0; k < PER_WORD; ++k) {
      const float off = x[h * PER_WORD + k] - mean;
      squares += off * off;
    }
  }
  const float scale = 1.0f / sqrtf(team_sum(squares, 1) / a.width + a.eps);
  if (threadIdx.x % TEAM == 0) {
    if (a.mean != nullptr) a.mean[row] = mean;
    a.scale[row] = scale;
  }
#pragma unroll
  for (int i = 0; i < HELD_NUMBERS; ++i) x[i] = (x[i] - mean) * scale;
  if (a.weight != nullptr) {
    load_row(a.weight, 0, words, other);
#pragma unroll
    for (int i = 0; i < HELD_NUMBERS; ++i) x[i] *= other[i];
  }
  if (a.bias != nullptr) {
    load_row(a.bias, 0, words, other);
#pragma unroll
    for (int i = 0; i < HELD_NUMBERS; ++i) x[i] += other[i];
  }
  store_row(a.out, row, words, x);
}

// Words of a row, packed so that more rows fit into registers.
struct Held {
  Words::Word words[HELD];

  DEVICE void load(const void* from, long long row, int count) {
    const Words::Word* all = static_cast<const Words::Word*>(from) + row * count;
    const float nothing[PER_WORD] = {};
#pragma unroll
    for (int h = 0; h < HELD; ++h) {
      words[h] = word_of(h) < count ? all[word_of(h)] : Words::pack(nothing);
    }
  }
};

// Numbers of one word of a row: the gradient times the weight, and the normalised input.
struct Place {
  float gradient[PER_WORD], normed[PER_WORD];

  DEVICE Place(const Held& g, const Held& x, int h, float mean, float scale) {
    Words::unpack(g.words[h], gradient);
    Words::unpack(x.words[h], normed);
    for (int k = 0; k < PER_WORD; ++k) normed[k] = (normed[k] - mean) * scale;
  }

  DEVICE void weigh(const Held& weight, int h) {
    float w[PER_WORD];
    Words::unpack(weight.words[h], w);
    for (int k = 0; k < PER_WORD; ++k) gradient[k] *= w[k];
  }
};

// Inputs of a backward for one row.
struct Row {
  Held g, x, more;
  float mean, scale;

  DEVICE void load(const NormBackwardArguments& a, long long row, int words) {
    g.load(a.gradient, row, words);
    x.load(a.sum, row, words);
    if (a.of_sum != nullptr) more.load(a.of_sum, row, words);
    mean = a.mean == nullptr ? 0.0f : a.mean[row];
    scale = a.scale[row];
  }
};

// Computes the gradient of one row; adds to the column sums of weight and bias.
DEVICE void row_backward(const NormBackwardArguments& a, long long row, int words, const Row& r,
                         const Held& weight, float* of_weight, float* of_bias) {
  float along = 0.0f, level = 0.0f;
#pragma unroll
  for (int h = 0; h < HELD; ++h) {
    Place place(r.g, r.x, h, r.mean, r.scale);
    for (int k = 0; k < PER_WORD; ++k) {
      of_weight[h * PER_WORD + k] += place.gradient[k] * place.normed[k];
      of_bias[h * PER_WORD + k] += place.gradient[k];
    }
    if (a.weight != nullptr) place.weigh(weight, h);
    for (int k = 0; k < PER_WORD; ++k) {
      along += place.gradient[k] * place.normed[k];
      level += place.gradient[k];
    }
  }
  along = team_sum(along, 0) / a.width;
  level = a.mean == nullptr ? 0.0f : team_sum(level, 1) / a.width;
#pragma unroll
  for (int h = 0; h < HELD; ++h) {
    if (word_of(h) >= words) continue;
    Place place(r.g, r.x, h, r.mean, r.scale);
    if (a.weight != nullptr) place.weigh(weight, h);
    float out[PER_WORD] = {};
    if (a.of_sum != nullptr) Words::unpack(r.more.words[h], out);
    for (int k = 0; k < PER_WORD; ++k) {
      out[k] += (place.gradient[k] - level - place.normed[k] * along) * r.scale;
    }
    static_cast<Words::Word*>(a.of_x)[row * words + word_of(h)] = Words::pack(out);
  }
  // RMSNorm needs only one sum per row, so the next row uses the same buffer. With the barrier, all threads have
  // read the buffer before.
  if (TEAM != 32 && a.mean == nullptr) __syncthreads();
}

// Adds the column sums of the block's teams, in their order, into the block's row of partial sums.
DEVICE void store_partial(float* partial, int width, const float* sums) {
  __shared__ float of_teams[TEAMS][TEAMS > 1 ? TEAM * HELD_NUMBERS : 1];
  float* row = partial + static_cast<long long>(blockIdx.x) * width;
  if (TEAMS == 1) {
    for (int h = 0; h < HELD; ++h) {
      for (int k = 0; k < PER_WORD; ++k) {
        const int column = word_of(h) * PER_WORD + k;
        if (column < width) row[column] = sums[h * PER_WORD + k];
      }
    }
    return;
  }
  __syncthreads();
#pragma unroll
  for (int h = 0; h < HELD; ++h) {
#pragma unroll
    for (int k = 0; k < PER_WORD; ++k) {
      const int number = h * PER_WORD + k;
      of_teams[threadIdx.x / TEAM][number * TEAM + threadIdx.x % TEAM] = sums[number];
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < TEAM * HELD_NUMBERS; i += THREADS) {
    const int number = i / TEAM;
    const int word = number / PER_WORD * TEAM + i % TEAM;
    const int column = word * PER_WORD + number % PER_WORD;
    float sum = 0.0f;
#pragma unroll
    for (int team = 0; team < TEAMS; ++team) sum += of_teams[team][i];
    if (column < width) row[column] = sum;
  }
}

KERNEL void __launch_bounds__(THREADS, NORM_BACKWARD_BLOCKS(HELD)) norm_backward(const NormBackwardArguments a) {
  const int words = a.width / PER_WORD;
  const long long team = static_cast<long long>(blockIdx.x) * TEAMS + threadIdx.x / TEAM;
  const long long first = team * a.rows_of_team;
  const long long end = first + a.rows_of_team < a.rows ? first + a.rows_of_team : a.rows;
  Row now, next;
  if (first < end) now.load(a, first, words);
  Held weight;
  if (a.weight != nullptr) weight.load(a.weight, 0, words);
  float of_weight[HELD_NUMBERS], of_bias[HELD_NUMBERS];
#pragma unroll
  for (int i = 0; i < HELD_NUMBERS; ++i) of_weight[i] = of_bias[i] = 0.0f;
  for (long long row = first; row < end; ++row) {
    const bool goes_on = row + 1 < end;
    if (READS_AHEAD && goes_on) next.load(a, row + 1, words);
    row_backward(a, row, words, now, weight, of_weight, of_bias);
    if (READS_AHEAD) now = next;
    if (!READS_AHEAD && goes_on) now.load(a, row + 1, words);
  }
  if (a.partial_weight != nullptr) store_partial(a.partial_weight, a.width, of_weight);
  if (a.partial_bias != nullptr) store_partial(a.partial_bias, a.width, of_bias);
}
