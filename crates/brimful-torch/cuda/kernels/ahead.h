// Kernels that the first launch of another family compiles ahead, for the same dtype: a model that uses the other
// family will use these, and each takes most of a second to compile.
#pragma once

#include "compiler.h"
#include "functions.h"

namespace brimful::kernels {

Compiling activation_compiling(NumberKind kind, Activation function);
Compiling column_partials_compiling(NumberKind kind);
Compiling cross_entropy_compiling(NumberKind kind);

}  // namespace brimful::kernels
