// What families have compiled for a kind of numbers, so that the first launch of one can have the others
// compiled ahead: a model that uses one will use them, and each takes most of a second.
#pragma once

#include "compiler.h"
#include "functions.h"

namespace brimful::kernels {

Compiling activation_compiling(NumberKind kind, Activation function);
Compiling column_partials_compiling(NumberKind kind);
Compiling cross_entropy_compiling(NumberKind kind);

}  // namespace brimful::kernels
