// Launches kernels/activation.cu.

#include "functions.h"

#include "ahead.h"
#include "kernel_family.h"
#include "kernel_sources.h"
#include "strips.h"

namespace brimful::kernels {

namespace {

const KernelFamily<3> family(
    activation_source, {Define{"KIND", kNumberKinds}, Define{"PER_WORD"}, Define{"FUNCTION"}});

std::array<int, 3> numbers_of(NumberKind kind, int64_t per_word, Activation function) {
  return {static_cast<int>(kind), static_cast<int>(per_word), static_cast<int>(function)};
}

}  // namespace

Compiling activation_compiling(NumberKind kind, Activation function) {
  return family.compiling(numbers_of(kind, numbers_a_word(kind), function));
}

void activation(
    const ActivationArguments& given, NumberKind kind, Activation function, bool backward) {
  const Strips strips(kind, given.outputs);
  ActivationArguments arguments = given;
  arguments.rows_of_block = strips.rows_of_block(given.rows);
  const auto numbers = numbers_of(kind, strips.per_word, function);
  family.of(backward ? "activation_backward" : "activation_forward", numbers)
      .launch(strips.shape(given.rows), arguments);
}

}  // namespace brimful::kernels
