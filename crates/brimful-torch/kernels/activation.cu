// Bias with GELU, or bias with SwiGLU, forward and backward. A block takes a strip of 32 words and some of its
// rows; each lane takes one word, and warps alternate over the rows:
//
//   forward    x + bias ─▶ gelu, or silu(first half) · second half ─▶ out
//   backward   gradient, x ─▶ gradient of x ─▶ added up over the warp's rows ─▶ warps in their order
//              ─▶ one row of partial sums a row block, which kernels/column_sums.cu adds up
//
// Sums follow the order of rows and warps, so results are deterministic.

#include "prelude.cuh"
#include "strip.cuh"
#include "activation_arguments.h"

// Defined outside: KIND and PER_WORD (numbers a word), and FUNCTION, one of these.
#define GELU_EXACT 0
#define GELU_TANH 1
#define SWIGLU 2
#define WARPS 8
#define HALVES (FUNCTION == SWIGLU ? 2 : 1)
// Rows loaded at once: a store in between would delay the next load.
#define FORWARD_ROWS (4 / HALVES)
#define BACKWARD_ROWS 2
// Blocks that the registers of a multiprocessor allow.
#define BLOCKS 4

typedef Packed<KIND, PER_WORD> Words;
typedef Words::Word Word;

#define LOG2_E 1.4426950408889634f

DEVICE float sigmoid(float x) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(-x * LOG2_E));
  // This division is as accurate as the power itself. A correctly rounded one would take longer than everything
  // else.
  return __fdividef(1.0f, 1.0f + power);
}

// √(8/π), and the coefficient of the cube.
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

// Returns the index of a lane's word in a row of outputs. In a row of inputs the second half begins `words` further.
DEVICE int column() { return blockIdx.x * 32 + threadIdx.x % 32; }

DEVICE void load_bias(const ActivationArguments& a, int words, float bias[HALVES][PER_WORD]) {
  for (int half = 0; half < HALVES; ++half) {
    for (int k = 0; k < PER_WORD; ++k) bias[half][k] = 0.0f;
    if (a.bias == nullptr || column() >= words) continue;
    Words::unpack(static_cast<const Word*>(a.bias)[half * words + column()], bias[half]);
  }
}

DEVICE void load_input(const ActivationArguments& a, long long row, int words,
                       Word input[HALVES]) {
  const Word* all = static_cast<const Word*>(a.x) + row * words * HALVES + column();
  for (int half = 0; half < HALVES; ++half) input[half] = all[half * words];
}

DEVICE void add_bias(const Word input[HALVES], const float bias[HALVES][PER_WORD],
                     float x[HALVES][PER_WORD]) {
  for (int half = 0; half < HALVES; ++half) {
    Words::unpack(input[half], x[half]);
    for (int k = 0; k < PER_WORD; ++k) x[half][k] += bias[half][k];
  }
}

KERNEL void __launch_bounds__(32 * WARPS, BLOCKS) activation_forward(const ActivationArguments a) {
  const int words = a.outputs / PER_WORD;
  if (column() >= words) return;
  float bias[HALVES][PER_WORD], x[HALVES][PER_WORD];
  load_bias(a, words, bias);
  const long long first = blockIdx.y * a.rows_of_block;
  const long long end = first + a.rows_of_block < a.rows ? first + a.rows_of_block : a.rows;
  for (long long row = first + threadIdx.x / 32; row < end; row += WARPS * FORWARD_ROWS) {
    Word inputs[FORWARD_ROWS][HALVES];
#pragma unroll
    for (int i = 0; i < FORWARD_ROWS; ++i) {
      if (row + i * WARPS < end) load_input(a, row + i * WARPS, words, inputs[i]);
    }
#pragma unroll
    for (int i = 0; i < FORWARD_ROWS; ++i) {
      if (row + i * WARPS >= end) break;
      add_bias(inputs[i], bias, x);
      float out[PER_WORD];
      for (int k = 0; k < PER_WORD; ++k) {
        out[k] = FUNCTION == SWIGLU ? x[0][k] * sigmoid(x[0][k]) * x[HALVES - 1][k] : gelu(x[0][k]);
      }
      static_cast<Word*>(a.out)[(row + i * WARPS) * words + column()] = Words::pack(out);
    }
  }
}

// Replaces a word's inputs by their gradients.
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

KERNEL void __launch_bounds__(32 * WARPS, BLOCKS) activation_backward(const ActivationArguments a) {
  const int words = a.outputs / PER_WORD;
  float bias[HALVES][PER_WORD], x[HALVES][PER_WORD], sums[HALVES][PER_WORD] = {};
  load_bias(a, words, bias);
  const long long first = blockIdx.y * a.rows_of_block;
  const long long end = first + a.rows_of_block < a.rows ? first + a.rows_of_block : a.rows;
  for (long long row = first + threadIdx.x / 32; row < end && column() < words;
       row += WARPS * BACKWARD_ROWS) {
    Word inputs[BACKWARD_ROWS][HALVES], gradients[BACKWARD_ROWS];
#pragma unroll
    for (int i = 0; i < BACKWARD_ROWS; ++i) {
      if (row + i * WARPS >= end) break;
      load_input(a, row + i * WARPS, words, inputs[i]);
      gradients[i] = static_cast<const Word*>(a.gradient)[(row + i * WARPS) * words + column()];
    }
#pragma unroll
    for (int i = 0; i < BACKWARD_ROWS; ++i) {
      if (row + i * WARPS >= end) break;
      float gradient[PER_WORD];
      Words::unpack(gradients[i], gradient);
      add_bias(inputs[i], bias, x);
      replace(gradient, x);
      Word* into = static_cast<Word*>(a.of_x) + (row + i * WARPS) * words * HALVES + column();
      for (int half = 0; half < HALVES; ++half) {
        into[half * words] = Words::pack(x[half]);
        for (int k = 0; k < PER_WORD; ++k) sums[half][k] += x[half][k];
      }
    }
  }
  if (a.partial_bias == nullptr) return;
  for (int half = 0; half < HALVES; ++half) {
    const long long row = static_cast<long long>(blockIdx.y) * HALVES + half;
    store_strip<WARPS, PER_WORD>(a.partial_bias + row * a.outputs, a.outputs, sums[half]);
  }
}
