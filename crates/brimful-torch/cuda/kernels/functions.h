// Functions of this folder for the bridge. They throw a KernelError if libtorch's own operations are to run
// instead.
#pragma once

#include "../../kernels/activation_arguments.h"
#include "../../kernels/add_halves_arguments.h"
#include "../../kernels/column_partials_arguments.h"
#include "../../kernels/column_sums_arguments.h"
#include "../../kernels/cross_entropy_arguments.h"
#include "../../kernels/norm_arguments.h"
#include "../../kernels/rotary_arguments.h"
#include "../../kernels/update_arguments.h"
#include "batch_norm.h"
#include "gpu.h"
#include "kernel.h"
#include "number_kind.h"
#include "product.h"
#include "source.h"

#include <cstdint>

namespace brimful::kernels {

// These functions run on the current stream of the current device; all pointers are device pointers.
void cross_entropy(const CrossEntropyArguments& arguments, NumberKind kind, int64_t rows);
void norm_forward(const NormForwardArguments& arguments, NumberKind kind);
// Returns the number of rows of partial sums that a backward writes.
int64_t norm_partial_rows(int64_t rows, int64_t width, NumberKind kind);
void norm_backward(const NormBackwardArguments& arguments, NumberKind kind);
// Adds numbers of this dtype to f32 sums, for this many tensors.
void add_halves(const AddHalvesArguments& arguments, NumberKind kind, int tensors);
// Returns the number of rows of partial sums written.
int64_t column_partial_rows(int64_t rows, int64_t columns, NumberKind kind);
void column_partials(const ColumnPartialsArguments& arguments, NumberKind kind);
void column_sums(const ColumnSumsArguments& arguments);
// Adds this many tables to their sums, at most one table per sum.
void add_column_sums(const AddColumnSumsArguments& arguments, int tables);

// Takes an optimizer's step on this many parameters of these dtypes.
void update(const UpdateArguments& arguments, UpdateKind parameter, UpdateKind moment, int tensors);

// `total` counts pairs of numbers, however many a thread reads at once.
void rotary(const RotaryArguments& arguments, NumberKind kind);

// Numbered as in kernels/activation.cu and src/activation.rs.
enum Activation : int { kGeluExact = 0, kGeluTanh = 1, kSwiGlu = 2 };
// A backward writes as many rows of partial sums as `column_partial_rows` returns for its outputs.
void activation(
    const ActivationArguments& arguments, NumberKind kind, Activation function, bool backward);

}  // namespace brimful::kernels
