// Launches kernels/rotary.cu: one thread per word of a head's first half.

#include "functions.h"

#include "kernel_family.h"
#include "kernel_sources.h"

#include <limits>

namespace brimful::kernels {

namespace {

constexpr int64_t kThreads = 256;

const KernelFamily<2> family(rotary_source, {Define{"KIND", kNumberKinds}, Define{"PER_WORD"}});

}  // namespace

void rotary(const RotaryArguments& given, NumberKind kind) {
  const int most = numbers_a_word(kind);
  const int per_word = given.half % most == 0 ? most : 1;
  RotaryArguments arguments = given;
  arguments.total = given.total / per_word;
  if (arguments.total == 0) return;
  const auto blocks = (arguments.total + kThreads - 1) / kThreads;
  if (blocks > std::numeric_limits<int32_t>::max()) {
    throw KernelError("rotary: libtorch handles 2^39 words and more");
  }
  const Shape shape{static_cast<unsigned>(blocks), 1, kThreads, 0, false};
  family.of("rotary", {kind, per_word}).launch(shape, arguments);
}

}  // namespace brimful::kernels
