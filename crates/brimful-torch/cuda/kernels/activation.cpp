// Launches kernels/activation.cu.

#include "functions.h"

#include "ahead.h"
#include "kernel_family.h"
#include "kernel_sources.h"
#include "strips.h"

namespace brimful::kernels {

namespace {

using ActivationFamily = KernelFamily<3>;

// Both directions are one module.
const ActivationFamily& family(bool backward) {
  static const std::array<Define, 3> defines{
      Define{"KIND", kNumberKinds}, Define{"PER_WORD"}, Define{"FUNCTION"}};
  static const ActivationFamily forwards(activation_source, "activation_forward", defines);
  static const ActivationFamily backwards(activation_source, "activation_backward", defines);
  return backward ? backwards : forwards;
}

ActivationFamily::Numbers numbers_of(NumberKind kind, int64_t per_word, Activation function) {
  return {static_cast<int>(kind), static_cast<int>(per_word), static_cast<int>(function)};
}

}  // namespace

Compiling activation_compiling(NumberKind kind, Activation function) {
  return family(false).compiling(numbers_of(kind, numbers_a_word(kind), function));
}

int64_t activation_row_blocks(int64_t rows, int64_t outputs, NumberKind kind) {
  return Strips(kind, outputs).row_blocks(rows);
}

void activation(
    const ActivationArguments& given, NumberKind kind, Activation function, bool backward) {
  const Strips strips(kind, given.outputs);
  ActivationArguments arguments = given;
  arguments.rows_of_block = strips.rows_of_block(given.rows);
  const auto numbers = numbers_of(kind, strips.per_word, function);
  family(backward).of(numbers).launch(strips.shape(given.rows), arguments);
}

}  // namespace brimful::kernels
