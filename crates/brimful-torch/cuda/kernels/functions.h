// The table by which the bridge calls what this folder can do. It is C++'s alone, and its functions
// throw: a KernelError where libtorch's own operations are to run instead.
#pragma once

#include "../../kernels/activation_arguments.h"
#include "../../kernels/add_halves_arguments.h"
#include "../../kernels/column_partials_arguments.h"
#include "../../kernels/column_sums_arguments.h"
#include "../../kernels/cross_entropy_arguments.h"
#include "../../kernels/norm_arguments.h"
#include "../../kernels/rotary_arguments.h"
#include "batch_norm.h"
#include "card.h"
#include "number_kind.h"
#include "product.h"
#include "source.h"

#include <cstdint>

#include <string>

namespace brimful::kernels {

// For what the device's kernels are compiled, and by what, such as "sm_90, NVRTC 13.0".
std::string describe(int device);

// Whether what goes to the current stream of the current device is captured.
bool is_capturing();

// On the current stream of the current device, which the pointers are of.
void cross_entropy(const CrossEntropyArguments& arguments, NumberKind kind, int64_t rows);
void norm_forward(const NormForwardArguments& arguments, NumberKind kind);
// How many rows of partial sums a backward writes.
int64_t norm_partial_rows(int64_t rows, int64_t width, NumberKind kind);
void norm_backward(const NormBackwardArguments& arguments, NumberKind kind);
// Of numbers of this kind to f32, of so many tensors.
void add_halves(const AddHalvesArguments& arguments, NumberKind kind, int tensors);
// How many rows of partial sums are written.
int64_t column_partial_rows(int64_t rows, int64_t columns, NumberKind kind);
void column_partials(const ColumnPartialsArguments& arguments, NumberKind kind);
void column_sums(const ColumnSumsArguments& arguments);
// Of so many tables, no two of which are added to the same sum.
void add_column_sums(const AddColumnSumsArguments& arguments, int tables);

// `total` is a number for each pair, whatever a thread reads at once.
void rotary(const RotaryArguments& arguments, NumberKind kind);

// As kernels/activation.cu and src/activation.rs number them.
enum class Activation : int { kGeluExact = 0, kGeluTanh = 1, kSwiGlu = 2 };
// How many rows of partial sums a backward writes.
int64_t activation_row_blocks(int64_t rows, int64_t outputs, NumberKind kind);
void activation(
    const ActivationArguments& arguments, NumberKind kind, Activation function, bool backward);

}  // namespace brimful::kernels

extern "C" {

#define BRIMFUL_FUNCTION(name) decltype(&brimful::kernels::name) name = brimful::kernels::name
struct BrimfulKernelFunctions {
  BRIMFUL_FUNCTION(describe);
  BRIMFUL_FUNCTION(pretend);
  BRIMFUL_FUNCTION(is_capturing);
  BRIMFUL_FUNCTION(cross_entropy);
  BRIMFUL_FUNCTION(norm_forward);
  BRIMFUL_FUNCTION(norm_partial_rows);
  BRIMFUL_FUNCTION(norm_backward);
  BRIMFUL_FUNCTION(add_halves);
  BRIMFUL_FUNCTION(column_partial_rows);
  BRIMFUL_FUNCTION(column_partials);
  BRIMFUL_FUNCTION(column_sums);
  BRIMFUL_FUNCTION(add_column_sums);
  BRIMFUL_FUNCTION(add_scaled_product);
  BRIMFUL_FUNCTION(rotary);
  BRIMFUL_FUNCTION(activation_row_blocks);
  BRIMFUL_FUNCTION(activation);
  BRIMFUL_FUNCTION(batch_norm_forward);
  BRIMFUL_FUNCTION(batch_norm_statistics);
  BRIMFUL_FUNCTION(batch_norm_moments);
  BRIMFUL_FUNCTION(batch_norm_pool);
  BRIMFUL_FUNCTION(batch_norm_backward);
};
#undef BRIMFUL_FUNCTION

}  // extern "C"
