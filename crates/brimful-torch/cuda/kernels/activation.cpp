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

}  // namespace

Compiling activation_compiling(NumberKind kind, Activation function) {
  return family.compiling({kind, numbers_a_word(kind), function});
}

void activation(
    const ActivationArguments& given, NumberKind kind, Activation function, bool backward) {
  const Strips strips(kind, given.outputs);
  ActivationArguments arguments = given;
  arguments.rows_of_block = strips.rows_of_block(given.rows);
  const auto* name = backward ? "activation_backward" : "activation_forward";
  family.of(name, {kind, strips.per_word, function}).launch(strips.shape(given.rows), arguments);
}

}  // namespace brimful::kernels
