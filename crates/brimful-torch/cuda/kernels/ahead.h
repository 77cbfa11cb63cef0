// Kernels that several families compile for a dtype, so that the first launch of one can compile the others
// ahead: a model that uses one will use them, and each takes most of a second.
#pragma once

#include "compiler.h"
#include "functions.h"

namespace brimful::kernels {

Compiling activation_compiling(NumberKind kind, Activation function);
Compiling column_partials_compiling(NumberKind kind);
Compiling cross_entropy_compiling(NumberKind kind);

}  // namespace brimful::kernels
