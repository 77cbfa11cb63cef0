// Launches kernels/activation.cu: strips of columns, and rows enough to fill the card.

#include "functions.h"

#include "ahead.h"
#include "kernel_family.h"
#include "kernel_sources.h"

#include <c10/cuda/CUDAFunctions.h>

#include <algorithm>

namespace brimful::kernels {

namespace {

constexpr unsigned kThreads = 256;
constexpr int64_t kWarps = 8;
constexpr int64_t kWordsAStrip = 32;
constexpr int64_t kBlocksAProcessor = 8;
// A warp takes at least so many rows, so that partial sums are few.
constexpr int64_t kRowsAWarp = 4;
constexpr int64_t kMostRowBlocks = 65535;

using ActivationFamily = KernelFamily<3>;

// Both directions are one module.
const ActivationFamily& family(bool backward) {
  static const std::array<Define, 3> defines{
      Define{"KIND", kNumberKinds}, Define{"PER_WORD"}, Define{"FUNCTION"}};
  static const ActivationFamily forwards(activation_source, "activation_forward", defines);
  static const ActivationFamily backwards(activation_source, "activation_backward", defines);
  return backward ? backwards : forwards;
}

int64_t numbers_at_once(NumberKind kind, int64_t outputs) {
  const int64_t most = numbers_a_word(kind);
  return outputs % most == 0 ? most : 1;
}

ActivationFamily::Numbers numbers_of(NumberKind kind, int64_t per_word, Activation function) {
  return {static_cast<int>(kind), static_cast<int>(per_word), static_cast<int>(function)};
}

int64_t strips(NumberKind kind, int64_t outputs) {
  const auto words = outputs / numbers_at_once(kind, outputs);
  return (words + kWordsAStrip - 1) / kWordsAStrip;
}

}  // namespace

Compiling activation_compiling(NumberKind kind, Activation function) {
  return family(false).compiling(numbers_of(kind, numbers_a_word(kind), function));
}

int64_t activation_row_blocks(int64_t rows, int64_t outputs, NumberKind kind) {
  const int64_t processors = card(c10::cuda::current_device()).multiprocessors;
  const auto wanted = processors * kBlocksAProcessor / std::max<int64_t>(strips(kind, outputs), 1);
  const auto most = (rows + kWarps * kRowsAWarp - 1) / (kWarps * kRowsAWarp);
  return std::clamp<int64_t>(std::min(wanted, most), 1, kMostRowBlocks);
}

void activation(
    const ActivationArguments& given, NumberKind kind, Activation function, bool backward) {
  const auto blocks = activation_row_blocks(given.rows, given.outputs, kind);
  ActivationArguments arguments = given;
  arguments.rows_of_block = (given.rows + blocks - 1) / blocks;
  const auto numbers = numbers_of(kind, numbers_at_once(kind, given.outputs), function);
  const Shape shape{
      static_cast<unsigned>(strips(kind, given.outputs)), static_cast<unsigned>(blocks), kThreads,
      0, false};
  family(backward).of(numbers).launch(shape, arguments);
}

}  // namespace brimful::kernels
