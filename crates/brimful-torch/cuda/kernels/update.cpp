// Launches kernels/update.cu, with enough blocks for the longest tensor to fill the GPU.

#include "functions.h"

#include "kernel_family.h"
#include "kernel_sources.h"

#include <c10/cuda/CUDAFunctions.h>

#include <algorithm>

namespace brimful::kernels {

namespace {

constexpr unsigned kThreads = 256;
constexpr int64_t kBlocksAProcessor = 8;
constexpr int64_t kNumbersAThread = 4;

static_assert(sizeof(UpdateArguments) <= 4096, "a launch takes 4 KiB of arguments");

const KernelFamily<3> family(
    update_source, {Define{"RULE"}, Define{"PARAMETER"}, Define{"MOMENT"}});

}  // namespace

void update(
    const UpdateArguments& arguments, UpdateKind parameter, UpdateKind moment, int tensors) {
  const auto longest = *std::max_element(arguments.count, arguments.count + tensors);
  const int64_t needed = longest / (kThreads * kNumbersAThread) + 1;
  const int64_t most = gpu(c10::cuda::current_device()).multiprocessors * kBlocksAProcessor;
  const Shape shape{
      static_cast<unsigned>(std::min(needed, most)), static_cast<unsigned>(tensors), kThreads, 0,
      false};
  family.of("update", {arguments.options.rule, parameter, moment}).launch(shape, arguments);
}

}  // namespace brimful::kernels
