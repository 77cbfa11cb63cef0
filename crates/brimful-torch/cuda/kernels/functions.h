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

struct BrimfulKernelFunctions {
  decltype(&brimful::kernels::describe) describe;
  decltype(&brimful::kernels::pretend) pretend;
  decltype(&brimful::kernels::is_capturing) is_capturing;
  decltype(&brimful::kernels::cross_entropy) cross_entropy;
  decltype(&brimful::kernels::norm_forward) norm_forward;
  decltype(&brimful::kernels::norm_partial_rows) norm_partial_rows;
  decltype(&brimful::kernels::norm_backward) norm_backward;
  decltype(&brimful::kernels::add_halves) add_halves;
  decltype(&brimful::kernels::column_partial_rows) column_partial_rows;
  decltype(&brimful::kernels::column_partials) column_partials;
  decltype(&brimful::kernels::column_sums) column_sums;
  decltype(&brimful::kernels::add_column_sums) add_column_sums;
  decltype(&brimful::kernels::add_scaled_product) add_scaled_product;
  decltype(&brimful::kernels::rotary) rotary;
  decltype(&brimful::kernels::activation_row_blocks) activation_row_blocks;
  decltype(&brimful::kernels::activation) activation;
  decltype(&brimful::kernels::batch_norm_forward) batch_norm_forward;
  decltype(&brimful::kernels::batch_norm_statistics) batch_norm_statistics;
  decltype(&brimful::kernels::batch_norm_moments) batch_norm_moments;
  decltype(&brimful::kernels::batch_norm_pool) batch_norm_pool;
  decltype(&brimful::kernels::batch_norm_backward) batch_norm_backward;
};

}  // extern "C"
