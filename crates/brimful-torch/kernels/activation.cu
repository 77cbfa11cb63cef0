// A bias and a GELU, or a bias and a SwiGLU, both ways. A block takes a strip of 32 words and some rows of
// it; a lane its word, warps take turns with rows:
//
//   forward    x + bias ─▶ gelu, or silu(first half) · second half ─▶ out
//   backward   gradient, x ─▶ gradient of x ─▶ added up over the warp's rows ─▶ warps in their order
//              ─▶ one row of partial sums a row block, which kernels/column_sums.cu adds up
//
// Sums are made in the order of rows and warps: always the same.

#include "prelude.cuh"
#include "activation_arguments.h"

// Defined outside: KIND and PER_WORD (numbers a word), and FUNCTION, one of these.
#define GELU_EXACT 0
#define GELU_TANH 1
#define SWIGLU 2
#define WARPS 8
#define HALVES (FUNCTION == SWIGLU ? 2 : 1)

typedef Packed<KIND, PER_WORD> Words;
typedef Words::Word Word;

#define LOG2_E 1.4426950408889634f

DEVICE float sigmoid(float x) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(-x * LOG2_E));
  return 1.0f / (1.0f + power);
}

// √(8/π), and what the cube counts for.
#define TANH_SCALE 1.5957691216057308f
#define TANH_CUBE 0.044715f
// 1/√2 and 1/√(2π).
#define ROOT_HALF 0.7071067811865476f
#define NORMAL_PEAK 0.3989422804014327f

DEVICE float gelu(float x) {
  if (FUNCTION == GELU_TANH) return x * sigmoid(TANH_SCALE * x * (1.0f + TANH_CUBE * x * x));
  return 0.5f * x * (1.0f + erff(x * ROOT_HALF));
}

DEVICE float gelu_slope(float x) {
  if (FUNCTION == GELU_TANH) {
    const float s = sigmoid(TANH_SCALE * x * (1.0f + TANH_CUBE * x * x));
    return s + x * s * (1.0f - s) * TANH_SCALE * (1.0f + 3.0f * TANH_CUBE * x * x);
  }
  const float below = 0.5f * (1.0f + erff(x * ROOT_HALF));
  return below + x * NORMAL_PEAK * expf(-0.5f * x * x);
}

// Which word of a row a lane has: `column` of the outputs, and as many words further for the second half.
DEVICE int column() { return blockIdx.x * 32 + threadIdx.x % 32; }

DEVICE void load_bias(const ActivationArguments& a, int words, float bias[HALVES][PER_WORD]) {
  for (int half = 0; half < HALVES; ++half) {
    for (int k = 0; k < PER_WORD; ++k) bias[half][k] = 0.0f;
    if (a.bias == nullptr || column() >= words) continue;
    Words::unpack(static_cast<const Word*>(a.bias)[half * words + column()], bias[half]);
  }
}

DEVICE void load_input(const ActivationArguments& a, long long row, int words,
                       const float bias[HALVES][PER_WORD], float x[HALVES][PER_WORD]) {
  const Word* all = static_cast<const Word*>(a.x) + row * words * HALVES + column();
  for (int half = 0; half < HALVES; ++half) {
    Words::unpack(all[half * words], x[half]);
    for (int k = 0; k < PER_WORD; ++k) x[half][k] += bias[half][k];
  }
}

KERNEL void __launch_bounds__(32 * WARPS) activation_forward(const ActivationArguments a) {
  const int words = a.outputs / PER_WORD;
  if (column() >= words) return;
  float bias[HALVES][PER_WORD], x[HALVES][PER_WORD];
  load_bias(a, words, bias);
  const long long first = blockIdx.y * a.rows_of_block;
  const long long end = first + a.rows_of_block < a.rows ? first + a.rows_of_block : a.rows;
#pragma unroll 4
  for (long long row = first + threadIdx.x / 32; row < end; row += WARPS) {
    load_input(a, row, words, bias, x);
    float out[PER_WORD];
    for (int k = 0; k < PER_WORD; ++k) {
      out[k] = FUNCTION == SWIGLU ? x[0][k] * sigmoid(x[0][k]) * x[HALVES - 1][k] : gelu(x[0][k]);
    }
    static_cast<Word*>(a.out)[row * words + column()] = Words::pack(out);
  }
}

// The gradients of a word's inputs, in their place.
DEVICE void replace(const float* gradient, float x[HALVES][PER_WORD]) {
  for (int k = 0; k < PER_WORD; ++k) {
    if (FUNCTION == SWIGLU) {
      const float gate = x[0][k], up = x[HALVES - 1][k], s = sigmoid(gate);
      x[0][k] = gradient[k] * up * (s + gate * s * (1.0f - s));
      x[HALVES - 1][k] = gradient[k] * gate * s;
    } else {
      x[0][k] = gradient[k] * gelu_slope(x[0][k]);
    }
  }
}

// Adds what the block's warps have, in their order, into the block's row of partial sums.
DEVICE void store_partial(const ActivationArguments& a, int words,
                          const float sums[HALVES][PER_WORD]) {
  __shared__ float of_warps[WARPS][32 * PER_WORD];
  const int lane = threadIdx.x % 32;
  for (int half = 0; half < HALVES; ++half) {
    __syncthreads();
    for (int k = 0; k < PER_WORD; ++k) {
      of_warps[threadIdx.x / 32][lane * PER_WORD + k] = sums[half][k];
    }
    __syncthreads();
    for (int i = threadIdx.x; i < 32 * PER_WORD; i += 32 * WARPS) {
      const int output = blockIdx.x * 32 * PER_WORD + i;
      if (output >= words * PER_WORD) continue;
      float sum = 0.0f;
      for (int warp = 0; warp < WARPS; ++warp) sum += of_warps[warp][i];
      const long long row = static_cast<long long>(blockIdx.y) * HALVES + half;
      a.partial_bias[row * a.outputs + output] = sum;
    }
  }
}

KERNEL void __launch_bounds__(32 * WARPS) activation_backward(const ActivationArguments a) {
  const int words = a.outputs / PER_WORD;
  float bias[HALVES][PER_WORD], x[HALVES][PER_WORD], sums[HALVES][PER_WORD] = {};
  load_bias(a, words, bias);
  const long long first = blockIdx.y * a.rows_of_block;
  const long long end = first + a.rows_of_block < a.rows ? first + a.rows_of_block : a.rows;
#pragma unroll 2
  for (long long row = first + threadIdx.x / 32; row < end && column() < words; row += WARPS) {
    float gradient[PER_WORD];
    load_input(a, row, words, bias, x);
    Words::unpack(static_cast<const Word*>(a.gradient)[row * words + column()], gradient);
    replace(gradient, x);
    Word* into = static_cast<Word*>(a.of_x) + row * words * HALVES + column();
    for (int half = 0; half < HALVES; ++half) {
      into[half * words] = Words::pack(x[half]);
      for (int k = 0; k < PER_WORD; ++k) sums[half][k] += x[half][k];
    }
  }
  if (a.partial_bias != nullptr) store_partial(a, words, sums);
}
