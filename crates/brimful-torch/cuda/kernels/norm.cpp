// Launches kernels/norm.cu and kernels/column_sums.cu: how many threads a row gets, and how many rows a
// block.

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

constexpr int kThreads = 256;
constexpr int kWarp = 32;
// A warp's thread keeps at most so many words of a row, a block's so many: registers end there.
constexpr int64_t kHeldByWarp = 3;
constexpr int64_t kHeldByBlock = 8;
constexpr int kBlocksAProcessor = 2;
constexpr int kColumnsABlock = 32;
constexpr int kColumnThreads = 512;

const char* name_of(NumberKind kind) {
  return kind == NumberKind::kF32 ? "F32" : kind == NumberKind::kBf16 ? "Bf16" : "F16";
}

// How a row of this width is spread over threads.
struct Spread {
  int64_t per_word, team, held;

  Spread(NumberKind kind, int64_t width) {
    const int64_t most = kind == NumberKind::kF32 ? 4 : 8;
    per_word = width % most == 0 ? most : 1;
    const auto words = width / per_word;
    team = words <= kWarp * kHeldByWarp ? kWarp : kThreads;
    held = std::max<int64_t>((words + team - 1) / team, 1);
    if (held > kHeldByBlock) {
      throw KernelError("norm: rows of " + std::to_string(width) + " numbers are too wide");
    }
  }
  int64_t teams() const { return kThreads / team; }
};

struct Norm {
  Norm(NumberKind kind, const Spread& spread)
      : forward(norm_source, "norm_forward", defines(kind, spread)),
        backward(norm_source, "norm_backward", defines(kind, spread)) {}

  static std::vector<std::string> defines(NumberKind kind, const Spread& spread) {
    const auto number = [](const char* name, int64_t value) {
      return std::string(name) + "=" + std::to_string(value);
    };
    return {
        std::string("KIND=") + name_of(kind), number("PER_WORD", spread.per_word),
        number("TEAM", spread.team), number("HELD", spread.held)};
  }

  const Kernel forward;
  const Kernel backward;
};

const Norm& kernels_for(NumberKind kind, const Spread& spread) {
  static std::mutex turn;
  static std::map<std::tuple<NumberKind, int64_t, int64_t, int64_t>, Norm> all;
  const std::lock_guard<std::mutex> alone(turn);
  const auto key = std::make_tuple(kind, spread.per_word, spread.team, spread.held);
  return all.try_emplace(key, kind, spread).first->second;
}

int64_t backward_blocks(int64_t rows, const Spread& spread) {
  const int64_t processors = card(c10::cuda::current_device()).multiprocessors;
  const auto needed = (rows + spread.teams() - 1) / spread.teams();
  return std::max<int64_t>(std::min(processors * kBlocksAProcessor, needed), 1);
}

}  // namespace

void norm_forward(const NormForwardArguments& arguments, NumberKind kind) {
  const Spread spread(kind, arguments.width);
  if (arguments.rows == 0) return;
  const auto blocks = (arguments.rows + spread.teams() - 1) / spread.teams();
  const Shape shape{static_cast<unsigned>(blocks), 1, kThreads, 0, false};
  kernels_for(kind, spread).forward.launch(shape, arguments);
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
  kernels_for(kind, spread).backward.launch(shape, arguments);
}

void column_sums(const ColumnSumsArguments& arguments) {
  static const Kernel kernel(column_sums_source, "column_sums", {});
  const auto blocks = (arguments.columns + kColumnsABlock - 1) / kColumnsABlock;
  if (blocks == 0) return;
  kernel.launch(Shape{static_cast<unsigned>(blocks), 1, kColumnThreads, 0, false}, arguments);
}

}  // namespace brimful::kernels
