// Launches kernels/cross_entropy.cu: one block a row, which keeps the row where shared memory allows.

#include "functions.h"

#include "kernel.h"
#include "kernel_sources.h"

#include <c10/cuda/CUDAFunctions.h>

namespace brimful::kernels {

namespace {

constexpr unsigned kThreads = 512;
// What a block has besides the row: results of its warps.
constexpr size_t kOtherBytes = 1 << 10;

// The kernels for one kind of numbers.
struct CrossEntropy {
  CrossEntropy(const std::string& kind, size_t bytes)
      : kept(cross_entropy_source, "cross_entropy_kept", defines(kind, bytes)),
        again(cross_entropy_source, "cross_entropy_again", defines(kind, bytes)),
        bytes(bytes) {}

  static std::vector<std::string> defines(const std::string& kind, size_t bytes) {
    return {"KIND=" + kind, "PER_WORD=" + std::to_string(16 / bytes)};
  }

  const Kernel kept;
  const Kernel again;
  const size_t bytes;
};

const CrossEntropy& kernels_for(NumberKind kind) {
  static const CrossEntropy f32("F32", 4);
  static const CrossEntropy bf16("Bf16", 2);
  static const CrossEntropy f16("F16", 2);
  return kind == NumberKind::kF32 ? f32 : kind == NumberKind::kBf16 ? bf16 : f16;
}

}  // namespace

void cross_entropy(const CrossEntropyArguments& arguments, NumberKind kind, int64_t rows) {
  const CrossEntropy& kernels = kernels_for(kind);
  const auto where = reinterpret_cast<uintptr_t>(arguments.logits);
  const auto step = static_cast<size_t>(arguments.step) * kernels.bytes;
  if (where % 16 != 0 || step % 16 != 0) {
    throw KernelError("cross_entropy: rows of logits do not begin at multiples of 16 bytes");
  }
  if (rows == 0) return;
  const auto row = static_cast<size_t>(arguments.classes) * kernels.bytes;
  const bool fits = row + kOtherBytes <= card(c10::cuda::current_device()).shared_bytes_per_block;
  const auto shared = fits ? (row + 15) / 16 * 16 : 0;
  const Shape shape{
      static_cast<unsigned>(rows), 1, kThreads, static_cast<unsigned>(shared), false};
  (fits ? kernels.kept : kernels.again).launch(shape, arguments);
}

}  // namespace brimful::kernels
