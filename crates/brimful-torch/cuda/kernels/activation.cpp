// Launches kernels/activation.cu: strips of columns, and rows enough to fill the card.

#include "functions.h"

#include "kernel.h"
#include "kernel_sources.h"

#include <c10/cuda/CUDAFunctions.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <tuple>

namespace brimful::kernels {

namespace {

constexpr unsigned kThreads = 256;
constexpr int64_t kWarps = 8;
constexpr int64_t kWordsAStrip = 32;
constexpr int64_t kBlocksAProcessor = 8;
// A warp takes at least so many rows, so that partial sums are few.
constexpr int64_t kRowsAWarp = 4;
constexpr int64_t kMostRowBlocks = 65535;

struct ActivationKernels {
  ActivationKernels(NumberKind kind, int64_t per_word, Activation function)
      : forward(activation_source, "activation_forward", defines(kind, per_word, function)),
        backward(activation_source, "activation_backward", defines(kind, per_word, function)) {}

  static std::vector<std::string> defines(
      NumberKind kind, int64_t per_word, Activation function) {
    const auto name =
        kind == NumberKind::kF32 ? "F32" : kind == NumberKind::kBf16 ? "Bf16" : "F16";
    return {
        std::string("KIND=") + name, "PER_WORD=" + std::to_string(per_word),
        "FUNCTION=" + std::to_string(static_cast<int>(function))};
  }

  const Kernel forward;
  const Kernel backward;
};

int64_t numbers_a_word(NumberKind kind, int64_t outputs) {
  const int64_t most = kind == NumberKind::kF32 ? 4 : 8;
  return outputs % most == 0 ? most : 1;
}

const ActivationKernels& kernels_for(NumberKind kind, int64_t per_word, Activation function) {
  static std::mutex turn;
  static std::map<std::tuple<NumberKind, int64_t, Activation>, ActivationKernels> all;
  const std::lock_guard<std::mutex> alone(turn);
  const auto key = std::make_tuple(kind, per_word, function);
  return all.try_emplace(key, kind, per_word, function).first->second;
}

int64_t strips(NumberKind kind, int64_t outputs) {
  const auto words = outputs / numbers_a_word(kind, outputs);
  return (words + kWordsAStrip - 1) / kWordsAStrip;
}

}  // namespace

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
  const auto& kernels = kernels_for(kind, numbers_a_word(kind, given.outputs), function);
  const Shape shape{
      static_cast<unsigned>(strips(kind, given.outputs)), static_cast<unsigned>(blocks), kThreads,
      0, false};
  (backward ? kernels.backward : kernels.forward).launch(shape, arguments);
}

}  // namespace brimful::kernels
