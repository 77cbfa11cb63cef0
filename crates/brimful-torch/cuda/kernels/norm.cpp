// Launches kernels/norm.cu: chooses threads per row and rows per block.

#include "functions.h"

#include "ahead.h"
#include "kernel_family.h"
#include "kernel_sources.h"

#include <c10/cuda/CUDAFunctions.h>

#include <algorithm>
#include <atomic>
#include <iterator>

namespace brimful::kernels {

namespace {

constexpr int kThreads = 256;
constexpr int kWarp = 32;
// Most words of a row that a thread keeps in registers, if a warp or a block shares the row.
constexpr int64_t kHeldByWarp = 3;
constexpr int64_t kHeldByBlock = 8;

// Distribution of a row of this width over threads.
struct Spread {
  int per_word, team, held;

  Spread(NumberKind kind, int64_t width) {
    const int most = numbers_a_word(kind);
    per_word = width % most == 0 ? most : 1;
    const auto words = width / per_word;
    team = words <= kWarp * kHeldByWarp ? kWarp : kThreads;
    held = static_cast<int>(std::max<int64_t>((words + team - 1) / team, 1));
    if (held > kHeldByBlock) {
      throw KernelError("norm: rows of " + std::to_string(width) + " numbers are too wide");
    }
  }
  int64_t teams() const { return kThreads / team; }
};

const KernelFamily<4> family(
    norm_source,
    {Define{"KIND", kNumberKinds}, Define{"PER_WORD"}, Define{"TEAM"}, Define{"HELD"}});

std::array<int, 4> numbers_of(NumberKind kind, const Spread& spread) {
  return {kind, spread.per_word, spread.team, spread.held};
}

int64_t backward_blocks(int64_t rows, const Spread& spread) {
  const int64_t processors = gpu(c10::cuda::current_device()).multiprocessors;
  const auto needed = (rows + spread.teams() - 1) / spread.teams();
  return std::max<int64_t>(std::min(processors * NORM_BACKWARD_BLOCKS(spread.held), needed), 1);
}

// Compiles ahead the other kernels that transformers with this norm use.
void expect_transformer(Compiling norm, NumberKind kind, bool rms) {
  const auto function = rms ? Activation::kSwiGlu : Activation::kGeluTanh;
  compile_ahead(
      {std::move(norm), activation_compiling(kind, function), column_partials_compiling(kind),
       cross_entropy_compiling(kind), {column_sums_source, {}}},
      architecture(c10::cuda::current_device()));
}

}  // namespace

void norm_forward(const NormForwardArguments& arguments, NumberKind kind) {
  const Spread spread(kind, arguments.width);
  if (arguments.rows == 0) return;
  const auto numbers = numbers_of(kind, spread);
  static std::array<std::atomic<bool>, std::size(kNumberKinds)> seen{};
  if (!seen[kind].exchange(true)) {
    const bool rms = arguments.mean == nullptr;
    expect_transformer(family.compiling(numbers), kind, rms);
  }
  const auto blocks = (arguments.rows + spread.teams() - 1) / spread.teams();
  const Shape shape{static_cast<unsigned>(blocks), 1, kThreads, 0, false};
  family.of("norm_forward", numbers).launch(shape, arguments);
}

int64_t norm_partial_rows(int64_t rows, int64_t width, NumberKind kind) {
  return backward_blocks(rows, Spread(kind, width));
}

void norm_backward(const NormBackwardArguments& given, NumberKind kind) {
  const Spread spread(kind, given.width);
  const auto blocks = backward_blocks(given.rows, spread);
  const auto teams = blocks * spread.teams();
  NormBackwardArguments arguments = given;
  arguments.rows_of_team = (given.rows + teams - 1) / teams;
  const Shape shape{static_cast<unsigned>(blocks), 1, kThreads, 0, false};
  family.of("norm_backward", numbers_of(kind, spread)).launch(shape, arguments);
}

}  // namespace brimful::kernels
