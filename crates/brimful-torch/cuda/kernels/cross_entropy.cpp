// Launches kernels/cross_entropy.cu: one block per row, which keeps the row in shared memory if it fits.

#include "functions.h"

#include "ahead.h"
#include "kernel_family.h"
#include "kernel_sources.h"

#include <c10/cuda/CUDAFunctions.h>

namespace brimful::kernels {

namespace {

constexpr unsigned kThreads = 512;
// Shared memory of a block besides the row: results of its warps.
constexpr size_t kOtherBytes = 1 << 10;

const KernelFamily<2> family(
    cross_entropy_source, {Define{"KIND", kNumberKinds}, Define{"PER_WORD"}});

}  // namespace

Compiling cross_entropy_compiling(NumberKind kind) {
  return family.compiling({kind, numbers_a_word(kind)});
}

void cross_entropy(const CrossEntropyArguments& arguments, NumberKind kind, int64_t rows) {
  const auto bytes = static_cast<size_t>(bytes_of(kind));
  const auto where = reinterpret_cast<uintptr_t>(arguments.logits);
  const auto step = static_cast<size_t>(arguments.step) * bytes;
  if (where % 16 != 0 || step % 16 != 0) {
    throw KernelError("cross_entropy: rows of logits do not begin at multiples of 16 bytes");
  }
  if (rows == 0) return;
  const auto row = static_cast<size_t>(arguments.classes) * bytes;
  const bool fits = row + kOtherBytes <= gpu(c10::cuda::current_device()).shared_bytes_per_block;
  const auto shared = fits ? (row + 15) / 16 * 16 : 0;
  const Shape shape{
      static_cast<unsigned>(rows), 1, kThreads, static_cast<unsigned>(shared), false};
  const auto* name = fits ? "cross_entropy_kept" : "cross_entropy_again";
  family.of(name, {kind, numbers_a_word(kind)}).launch(shape, arguments);
}

}  // namespace brimful::kernels
