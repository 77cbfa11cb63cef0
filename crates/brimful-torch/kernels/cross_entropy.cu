// Cross-entropy of rows of logits, which are overwritten with its gradient. One block per row:
//
//   row ──▶ words of each thread ────▶ largest, Σ exp, Σ weight·logit ──▶ block ──▶ the row's loss
//    │           └─ kept in shared memory (or read again: most of it is still in L2)
//    └──◀── exp(logit − largest) · c  −  weights of the target and of all classes
//
// The sum of exponentials is rescaled whenever a larger logit comes, so that one pass is enough. Words are
// assigned to threads by index, and sums follow the order of lanes and warps, so results are deterministic.

#include "prelude.cuh"
#include "cross_entropy_arguments.h"

// KIND and PER_WORD are defined outside: Bf16 and F16 have 8 numbers a word, F32 has 4.
#define THREADS 512
#define WARPS (THREADS / 32)

typedef Packed<KIND, PER_WORD> Words;

#define SMALLEST (-3.402823466e38f)
#define LOG2_E 1.4426950408889634f
#define LN_2 0.6931471805599453f

// Returns exp(x) for x ≤ 0.
DEVICE float power(float x) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x * LOG2_E));
  return r;
}

// Running maximum and sums over some of a row's logits.
struct Known {
  float largest, sum, spread;
};

// Target of a row and its weights.
struct Target {
  long long index;
  float logit, shift;
  float of_target, of_all;
};

DEVICE float weight_of(const CrossEntropyArguments& a, long long j) {
  return a.class_weights == nullptr ? 1.0f : a.class_weights[j];
}

// Adds COUNT logits, the first with index `first`. A class at minus infinity adds 0.
template <int COUNT>
DEVICE void add(const CrossEntropyArguments& a, const Target& t, const float* x, long long first,
                Known& known) {
  float largest = known.largest;
#pragma unroll
  for (int k = 0; k < COUNT; ++k) largest = fmaxf(largest, x[k]);
  float sum = known.sum * power(known.largest - largest);
#pragma unroll
  for (int k = 0; k < COUNT; ++k) sum += power(x[k] - largest);
  known.largest = largest;
  known.sum = sum;
  if (a.of_all == nullptr) return;
#pragma unroll
  for (int k = 0; k < COUNT; ++k) known.spread += weight_of(a, first + k) * (x[k] - t.shift);
}

DEVICE Known joined(const Known& a, const Known& b) {
  Known out;
  out.largest = fmaxf(a.largest, b.largest);
  out.sum = a.sum * power(a.largest - out.largest) + b.sum * power(b.largest - out.largest);
  out.spread = a.spread + b.spread;
  return out;
}

DEVICE Known over_block(Known known) {
  __shared__ Known of_warps[WARPS];
  for (int across = 16; across > 0; across >>= 1) {
    Known other;
    other.largest = from_lane(known.largest, across);
    other.sum = from_lane(known.sum, across);
    other.spread = from_lane(known.spread, across);
    known = joined(known, other);
  }
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = known;
  __syncthreads();
  known = of_warps[0];
  for (int warp = 1; warp < WARPS; ++warp) known = joined(known, of_warps[warp]);
  return known;
}

DEVICE Target target_of(const CrossEntropyArguments& a, long long row, const KIND::Number* logits) {
  Target t;
  t.index = a.index[row];
  t.logit = KIND::widen(logits[t.index]);
  // Sums differences to the target's logit, which rounds less when logits are close to each other.
  t.shift = fabsf(t.logit) <= -SMALLEST ? t.logit : 0.0f;
  t.of_target = a.of_target[row];
  t.of_all = a.of_all == nullptr ? 0.0f : a.of_all[row];
  return t;
}

DEVICE float loss_of(const CrossEntropyArguments& a, const Target& t, const Known& known) {
  const float log_sum = log2f(known.sum) * LN_2;
  float loss = t.of_target * (log_sum - (t.logit - known.largest));
  if (a.of_all != nullptr) {
    const float shifted = log_sum - (t.shift - known.largest);
    loss += t.of_all * (shifted * *a.total - known.spread);
  }
  return loss;
}

// Replaces COUNT logits by their gradients.
template <int COUNT>
DEVICE void replace(const CrossEntropyArguments& a, const Target& t, const Known& known, float factor,
                    long long first, float* x) {
#pragma unroll
  for (int k = 0; k < COUNT; ++k) x[k] = power(x[k] - known.largest) * factor;
  if (a.of_all != nullptr) {
#pragma unroll
    for (int k = 0; k < COUNT; ++k) x[k] -= t.of_all * weight_of(a, first + k);
  }
  // Only one word of a row contains its target.
  if (t.index < first || t.index >= first + COUNT) return;
#pragma unroll
  for (int k = 0; k < COUNT; ++k) x[k] -= first + k == t.index ? t.of_target : 0.0f;
}

// Writes a zero loss and gradient for an ignored row.
DEVICE void clear(const CrossEntropyArguments& a, long long row, Words::Word* words,
                  KIND::Number* logits) {
  if (threadIdx.x == 0) a.losses[row] = 0.0f;
  if (!a.gradient) return;
  float nothing[PER_WORD] = {};
  const int count = a.classes / PER_WORD;
  for (int i = threadIdx.x; i < count; i += THREADS) words[i] = Words::pack(nothing);
  for (int i = count * PER_WORD + threadIdx.x; i < a.classes; i += THREADS) {
    logits[i] = KIND::narrow(0.0f);
  }
}

template <bool KEPT>
DEVICE Known read(const CrossEntropyArguments& a, const Target& t, const Words::Word* words,
                  const KIND::Number* logits, Words::Word* kept) {
  Known known = {SMALLEST, 0.0f, 0.0f};
  const int count = a.classes / PER_WORD;
#pragma unroll 4
  for (int i = threadIdx.x; i < count; i += THREADS) {
    const Words::Word word = KEPT ? Words::load(words + i) : words[i];
    if (KEPT) kept[i] = word;
    float x[PER_WORD];
    Words::unpack(word, x);
    add<PER_WORD>(a, t, x, static_cast<long long>(i) * PER_WORD, known);
  }
  for (int i = count * PER_WORD + threadIdx.x; i < a.classes; i += THREADS) {
    const float x = KIND::widen(logits[i]);
    add<1>(a, t, &x, i, known);
  }
  return over_block(known);
}

template <bool KEPT>
DEVICE void leave(const CrossEntropyArguments& a, const Target& t, const Known& known,
                  Words::Word* words, KIND::Number* logits, const Words::Word* kept) {
  const float all = a.of_all == nullptr ? 0.0f : t.of_all * *a.total;
  const float factor = (t.of_target + all) / known.sum;
  const int count = a.classes / PER_WORD;
#pragma unroll 2
  for (int i = threadIdx.x; i < count; i += THREADS) {
    float x[PER_WORD];
    Words::unpack(KEPT ? kept[i] : words[i], x);
    replace<PER_WORD>(a, t, known, factor, static_cast<long long>(i) * PER_WORD, x);
    words[i] = Words::pack(x);
  }
  for (int i = count * PER_WORD + threadIdx.x; i < a.classes; i += THREADS) {
    float x = KIND::widen(logits[i]);
    replace<1>(a, t, known, factor, i, &x);
    logits[i] = KIND::narrow(x);
  }
}

template <bool KEPT>
DEVICE void row_of(const CrossEntropyArguments& a, Words::Word* kept) {
  const long long row = blockIdx.x;
  KIND::Number* logits = static_cast<KIND::Number*>(a.logits) + row * a.step;
  Words::Word* words = reinterpret_cast<Words::Word*>(logits);
  if (!a.counted[row]) return clear(a, row, words, logits);
  const Target t = target_of(a, row, logits);
  const Known known = read<KEPT>(a, t, words, logits, kept);
  if (threadIdx.x == 0) a.losses[row] = loss_of(a, t, known);
  if (a.gradient) leave<KEPT>(a, t, known, words, logits, kept);
}

KERNEL void __launch_bounds__(THREADS, 2) cross_entropy_kept(const CrossEntropyArguments arguments) {
  SHARED_WORDS(kept);
  row_of<true>(arguments, kept);
}

KERNEL void __launch_bounds__(THREADS, 2) cross_entropy_again(const CrossEntropyArguments arguments) {
  row_of<false>(arguments, nullptr);
}
