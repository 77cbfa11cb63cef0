// Launch configuration of kernels that go down strips of columns, with enough rows to fill the GPU.
#pragma once

#include "gpu.h"
#include "kernel.h"
#include "number_kind.h"

#include <c10/cuda/CUDAFunctions.h>

#include <algorithm>
#include <cstdint>

namespace brimful::kernels {

struct Strips {
  static constexpr int64_t kWarps = 8;
  static constexpr int64_t kWordsAStrip = 32;
  static constexpr int64_t kBlocksAProcessor = 8;
  // Least rows per warp, so that there are few partial sums.
  static constexpr int64_t kRowsAWarp = 4;
  static constexpr int64_t kMostRowBlocks = 65535;

  Strips(NumberKind kind, int64_t columns) {
    const int most = numbers_a_word(kind);
    per_word = columns % most == 0 ? most : 1;
    count = (columns / per_word + kWordsAStrip - 1) / kWordsAStrip;
  }

  // Returns the number of row blocks, each of which writes a row of partial sums.
  int64_t row_blocks(int64_t rows) const {
    const int64_t processors = gpu(c10::cuda::current_device()).multiprocessors;
    const auto wanted = processors * kBlocksAProcessor / std::max<int64_t>(count, 1);
    const auto most = (rows + kWarps * kRowsAWarp - 1) / (kWarps * kRowsAWarp);
    return std::clamp<int64_t>(std::min(wanted, most), 1, kMostRowBlocks);
  }

  int64_t rows_of_block(int64_t rows) const {
    const auto blocks = row_blocks(rows);
    return (rows + blocks - 1) / blocks;
  }

  Shape shape(int64_t rows) const {
    return {
        static_cast<unsigned>(count), static_cast<unsigned>(row_blocks(rows)),
        static_cast<unsigned>(32 * kWarps), 0, false};
  }

  int per_word;
  int64_t count;
};

}  // namespace brimful::kernels
