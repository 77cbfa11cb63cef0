// Optimizer steps on the host, in one pass over the memory:
//
//   parameter · gradient · moments  ──▶  blocks in the L1 cache, widened  ──▶  parameter' · moments'
//
// Each stage is a loop over a block: every dtype has a loop that widens and one that narrows, and every rule has a
// loop. The loops are compiled without contractions, and for wide registers where the machine has them.

#include "host_update.h"

#include <c10/util/Half.h>

#include <cstring>

#if defined(__x86_64__)
#define BRIMFUL_WIDE __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define BRIMFUL_WIDE
#endif
// Inlined into the loops, so that these are compiled for wide registers.
#define SHARED static inline __attribute__((always_inline))

namespace {

SHARED unsigned bits_of(float number) {
  unsigned bits;
  std::memcpy(&bits, &number, sizeof bits);
  return bits;
}

SHARED float number_of(unsigned bits) {
  float number;
  std::memcpy(&number, &bits, sizeof number);
  return number;
}

template <class Number>
SHARED Number product(Number a, Number b) {
  return a * b;
}

template <class Number>
SHARED Number quotient(Number a, Number b) {
  return a / b;
}

SHARED float multiply_add(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
SHARED double multiply_add(double a, double b, double c) { return __builtin_fma(a, b, c); }
SHARED float root(float number) { return __builtin_sqrtf(number); }
SHARED double root(double number) { return __builtin_sqrt(number); }
SHARED float absolute(float number) { return __builtin_fabsf(number); }
SHARED int whole_of(float number) { return static_cast<int>(number); }

template <class Number>
SHARED Number largest_of(Number a, Number b) {
  return a > b ? a : b;
}

#include "../kernels/update_math.h"

// Four arrays of f64 (parameter, gradient, two moments) take 32 KiB.
constexpr int64_t kBlock = 1024;
static_assert(kBlock % UPDATE_GROUP == 0, "a block has whole groups");

template <class Number>
struct Block {
  alignas(64) Number parameter[kBlock];
  alignas(64) Number gradient[kBlock];
  alignas(64) Number moments[UPDATE_MOMENTS][kBlock];
};

template <class Element>
SHARED Element* at(void* places, int64_t begin) {
  return static_cast<Element*>(places) + begin;
}

template <class Element>
SHARED const Element* at(const void* places, int64_t begin) {
  return static_cast<const Element*>(places) + begin;
}

SHARED void widen(
    const void* from, UpdateKind /*kind*/, int64_t begin, int64_t count, double* to) {
  const auto* numbers = at<double>(from, begin);
  for (int64_t i = 0; i < count; ++i) to[i] = numbers[i];
}

SHARED void widen(const void* from, UpdateKind kind, int64_t begin, int64_t count, float* to) {
  if (kind == kUpdateF32) {
    std::memcpy(to, at<float>(from, begin), count * sizeof(float));
    return;
  }
  const auto* numbers = at<unsigned short>(from, begin);
  if (kind == kUpdateBf16) {
    for (int64_t i = 0; i < count; ++i) to[i] = widen_bf16(numbers[i]);
  } else {
    for (int64_t i = 0; i < count; ++i) to[i] = c10::detail::fp16_ieee_to_fp32_value(numbers[i]);
  }
}

SHARED void widen_parameter(
    const UpdatePlaces& places, UpdateKind kind, int64_t begin, int64_t count, double* to) {
  widen(places.parameter, kind, begin, count, to);
}

SHARED void widen_parameter(
    const UpdatePlaces& places, UpdateKind kind, int64_t begin, int64_t count, float* to) {
  if (kind == kUpdateBf16 && places.master != nullptr) {
    const auto* weight = at<unsigned short>(places.parameter, begin);
    const auto* remainder = at<short>(places.master, begin);
    for (int64_t i = 0; i < count; ++i) to[i] = join(weight[i], remainder[i]);
  } else if (kind == kUpdateF16) {
    widen(places.master, kUpdateF32, begin, count, to);
  } else {
    widen(places.parameter, kind, begin, count, to);
  }
}

SHARED void narrow_parameter(
    const double* from, const UpdatePlaces& places, UpdateKind /*kind*/, int64_t begin, int64_t count) {
  std::memcpy(at<double>(places.parameter, begin), from, count * sizeof(double));
}

SHARED void narrow_parameter(
    const float* from, const UpdatePlaces& places, UpdateKind kind, int64_t begin, int64_t count) {
  if (kind == kUpdateF32) {
    std::memcpy(at<float>(places.parameter, begin), from, count * sizeof(float));
    return;
  }
  auto* weight = at<unsigned short>(places.parameter, begin);
  if (kind == kUpdateBf16) {
    // A direction has no remainder.
    if (places.master == nullptr) {
      for (int64_t i = 0; i < count; ++i) weight[i] = split(from[i]).weight;
      return;
    }
    auto* remainder = at<short>(places.master, begin);
    for (int64_t i = 0; i < count; ++i) {
      const SplitNumber all = split(from[i]);
      weight[i] = all.weight;
      remainder[i] = all.remainder;
    }
  } else {
    std::memcpy(at<float>(places.master, begin), from, count * sizeof(float));
    for (int64_t i = 0; i < count; ++i) weight[i] = c10::detail::fp16_ieee_from_fp32_value(from[i]);
  }
}

SHARED int64_t group_end(int64_t begin, int64_t count) {
  return begin + UPDATE_GROUP < count ? begin + UPDATE_GROUP : count;
}

SHARED void widen_moment(
    const UpdatePlaces& places, int which, UpdateKind kind, int64_t begin, int64_t count, double* to) {
  widen(places.moments[which], kind, begin, count, to);
}

SHARED void widen_moment(
    const UpdatePlaces& places, int which, UpdateKind kind, int64_t begin, int64_t count, float* to) {
  if (kind != kUpdateEightBit) return widen(places.moments[which], kind, begin, count, to);
  const float* scales = places.scales[which] + begin / UPDATE_GROUP;
  for (int64_t first = 0; first < count; first += UPDATE_GROUP) {
    const float scale = scales[first / UPDATE_GROUP];
    const int64_t end = group_end(first, count);
    if (which == 0) {
      const auto* codes = at<signed char>(places.moments[which], begin);
      for (int64_t i = first; i < end; ++i) to[i] = unpack_signed(codes[i], scale);
    } else {
      const auto* codes = at<unsigned char>(places.moments[which], begin);
      for (int64_t i = first; i < end; ++i) to[i] = unpack_square(codes[i], scale);
    }
  }
}

SHARED void narrow_moment(
    const double* from, const UpdatePlaces& places, int which, UpdateKind /*kind*/, int64_t begin,
    int64_t count) {
  std::memcpy(at<double>(places.moments[which], begin), from, count * sizeof(double));
}

SHARED void narrow_moment(
    const float* from, const UpdatePlaces& places, int which, UpdateKind kind, int64_t begin,
    int64_t count) {
  if (kind == kUpdateF32) {
    std::memcpy(at<float>(places.moments[which], begin), from, count * sizeof(float));
    return;
  }
  if (kind == kUpdateBf16) {
    auto* numbers = at<unsigned short>(places.moments[which], begin);
    for (int64_t i = 0; i < count; ++i) numbers[i] = pack_bf16(from[i]);
    return;
  }
  float* scales = places.scales[which] + begin / UPDATE_GROUP;
  for (int64_t first = 0; first < count; first += UPDATE_GROUP) {
    const int64_t end = group_end(first, count);
    // Non-negative floats are ordered as their bits are, and the compiler vectorises a maximum of integers.
    int largest = 0;
    for (int64_t i = first; i < end; ++i) {
      const int bits = static_cast<int>(bits_of(absolute(from[i])));
      largest = bits > largest ? bits : largest;
    }
    const float scale = scales[first / UPDATE_GROUP] = number_of(static_cast<unsigned>(largest));
    if (which == 0) {
      auto* codes = at<signed char>(places.moments[which], begin);
      const float factor = to_codes(scale, kSignedCodes);
      for (int64_t i = first; i < end; ++i) codes[i] = pack_signed(from[i], factor);
    } else {
      auto* codes = at<unsigned char>(places.moments[which], begin);
      const float factor = to_codes(scale, kSquareCodes);
      for (int64_t i = first; i < end; ++i) codes[i] = pack_square(from[i], factor);
    }
  }
}

template <class Number>
SHARED void apply(
    const UpdateOptions& o, const StepNumbers<Number>& given, const brimful::HostUpdate& update,
    Block<Number>& block, int64_t count) {
  const StepNumbers<Number> n = given;
  const bool has_moment = update.places.moments[0] != nullptr, nesterov = o.nesterov;
  Number *__restrict p = block.parameter, *__restrict g = block.gradient;
  Number *__restrict m = block.moments[0], *__restrict v = block.moments[1];
  Number* __restrict most = block.moments[2];
  if (o.rule == kSgd) {
    for (int64_t i = 0; i < count; ++i) {
      sgd(n, has_moment, nesterov, update.first, g[i], p[i], m[i]);
    }
  } else if (o.rule == kDirection) {
    for (int64_t i = 0; i < count; ++i) direction(n, nesterov, g[i], p[i], m[i]);
  } else if (update.places.moments[2] == nullptr) {
    for (int64_t i = 0; i < count; ++i) {
      adam(n, g[i], p[i], m[i], v[i], static_cast<Number*>(nullptr));
    }
  } else {
    for (int64_t i = 0; i < count; ++i) adam(n, g[i], p[i], m[i], v[i], most + i);
  }
}

template <class Number>
SHARED void update_blocks(
    const UpdateOptions& o, const brimful::HostUpdate& update, int64_t begin, int64_t end) {
  const auto numbers = step_numbers<Number>(o, update.rate, update.step);
  const UpdatePlaces& places = update.places;
  Block<Number> block;
  for (int64_t first = begin; first < end; first += kBlock) {
    const int64_t count = end - first < kBlock ? end - first : kBlock;
    widen(update.gradient, update.gradient_kind, first, count, block.gradient);
    if (o.rule != kDirection) {
      widen_parameter(places, update.parameter_kind, first, count, block.parameter);
    }
    for (int which = 0; which < UPDATE_MOMENTS && places.moments[which] != nullptr; ++which) {
      widen_moment(places, which, update.moment_kind, first, count, block.moments[which]);
    }
    apply(o, numbers, update, block, count);
    narrow_parameter(block.parameter, places, update.parameter_kind, first, count);
    for (int which = 0; which < UPDATE_MOMENTS && places.moments[which] != nullptr; ++which) {
      narrow_moment(block.moments[which], places, which, update.moment_kind, first, count);
    }
  }
}

}  // namespace

namespace brimful {

BRIMFUL_WIDE void host_update(
    const UpdateOptions& options, const HostUpdate& update, int64_t begin, int64_t end) {
  if (update.parameter_kind == kUpdateF64) {
    update_blocks<double>(options, update, begin, end);
  } else {
    update_blocks<float>(options, update, begin, end);
  }
}

}  // namespace brimful
