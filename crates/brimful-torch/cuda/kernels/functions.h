// What this folder can do for the bridge. Its functions throw: a KernelError where libtorch's own operations are to
// run instead.
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
#include "kernel.h"
#include "number_kind.h"
#include "product.h"
#include "source.h"

#include <cstdint>

namespace brimful::kernels {

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
enum Activation : int { kGeluExact = 0, kGeluTanh = 1, kSwiGlu = 2 };
// A backward writes as many rows of partial sums as `column_partial_rows` says of its outputs.
void activation(
    const ActivationArguments& arguments, NumberKind kind, Activation function, bool backward);

}  // namespace brimful::kernels
