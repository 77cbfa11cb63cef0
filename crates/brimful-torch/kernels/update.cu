// A step of SGD, Adam or Muon's momentum on many parameters, in place. Each tensor has a row of blocks. A warp handles
// a group of 128 numbers, which share the scales of 8-bit moments, four numbers a lane:
//
//   parameter (and master) ─┐                                ┌──▶ parameter (and master)
//   gradient ───────────────┼─▶ widened ─▶ the rule ─▶ narrowed
//   moments (and scales) ───┘                                └──▶ moments (and scales)

#include "prelude.cuh"
#include "update_arguments.h"

#define SHARED DEVICE
// The result of each operation is rounded: the compiler does not contract them.
DEVICE float product(float a, float b) { return __fmul_rn(a, b); }
DEVICE double product(double a, double b) { return __dmul_rn(a, b); }
DEVICE float quotient(float a, float b) { return __fdiv_rn(a, b); }
DEVICE double quotient(double a, double b) { return __ddiv_rn(a, b); }
DEVICE float multiply_add(float a, float b, float c) { return __fmaf_rn(a, b, c); }
DEVICE double multiply_add(double a, double b, double c) { return __fma_rn(a, b, c); }
DEVICE float root(float number) { return __fsqrt_rn(number); }
DEVICE double root(double number) { return __dsqrt_rn(number); }
DEVICE float absolute(float number) { return fabsf(number); }
DEVICE float largest_of(float a, float b) { return a > b ? a : b; }
DEVICE double largest_of(double a, double b) { return a > b ? a : b; }
DEVICE unsigned bits_of(float number) { return __float_as_uint(number); }
DEVICE float number_of(unsigned bits) { return __uint_as_float(bits); }
DEVICE int whole_of(float number) { return static_cast<int>(number); }

#include "update_math.h"

// Defined outside: RULE, PARAMETER and MOMENT (dtypes of update_arguments.h).
#define WARPS 8
#define A_LANE 4

template <bool Wide>
struct Computing {
  typedef float Number;
};
template <>
struct Computing<true> {
  typedef double Number;
};
typedef Computing<PARAMETER == kUpdateF64>::Number Number;

// Consecutive elements of a lane, in one access or two.
template <class Element>
struct __align__(sizeof(Element) > 4 ? 16 : 4 * sizeof(Element)) Four {
  Element of[A_LANE];
};

// Elements of a lane: index of the first, and their number.
struct Lane {
  long long begin;
  int count;
  bool whole;  // all four, and aligned

  template <class Element>
  DEVICE Four<Element> load(const void* from) const {
    const Element* place = static_cast<const Element*>(from) + begin;
    if (whole) return *reinterpret_cast<const Four<Element>*>(place);
    Four<Element> four;
    for (int k = 0; k < A_LANE; ++k) four.of[k] = k < count ? place[k] : Element(0);
    return four;
  }

  template <class Element>
  DEVICE void store(void* into, const Four<Element>& four) const {
    Element* place = static_cast<Element*>(into) + begin;
    if (whole) {
      *reinterpret_cast<Four<Element>*>(place) = four;
      return;
    }
    for (int k = 0; k < A_LANE; ++k) {
      if (k < count) place[k] = four.of[k];
    }
  }
};

DEVICE void widen(const Lane& lane, const void* from, int kind, float* to) {
  if (kind == kUpdateF32) {
    const Four<float> four = lane.load<float>(from);
    for (int k = 0; k < A_LANE; ++k) to[k] = four.of[k];
    return;
  }
  const Four<u16> four = lane.load<u16>(from);
  for (int k = 0; k < A_LANE; ++k) {
    to[k] = kind == kUpdateBf16 ? widen_bf16(four.of[k]) : F16::widen(four.of[k]);
  }
}

DEVICE void widen(const Lane& lane, const void* from, int, double* to) {
  const Four<double> four = lane.load<double>(from);
  for (int k = 0; k < A_LANE; ++k) to[k] = four.of[k];
}

DEVICE void store_plain(const Lane& lane, const float* from, void* into) {
  Four<float> four;
  for (int k = 0; k < A_LANE; ++k) four.of[k] = from[k];
  lane.store(into, four);
}

DEVICE void store_plain(const Lane& lane, const double* from, void* into) {
  Four<double> four;
  for (int k = 0; k < A_LANE; ++k) four.of[k] = from[k];
  lane.store(into, four);
}

template <class Number>
DEVICE void widen_parameter(const Lane& lane, const UpdatePlaces& places, Number* to) {
  widen(lane, PARAMETER == kUpdateF16 ? places.master : places.parameter,
        PARAMETER == kUpdateF16 ? kUpdateF32 : PARAMETER, to);
}

// Overload for f32 arithmetic: joins a bf16 parameter with its remainder.
DEVICE void widen_parameter(const Lane& lane, const UpdatePlaces& places, float* to) {
  if (PARAMETER != kUpdateBf16) return widen_parameter<float>(lane, places, to);
  const Four<u16> weights = lane.load<u16>(places.parameter);
  const Four<short> remainders = lane.load<short>(places.master);
  for (int k = 0; k < A_LANE; ++k) to[k] = join(weights.of[k], remainders.of[k]);
}

DEVICE void narrow_parameter(const Lane& lane, const double* from, const UpdatePlaces& places) {
  store_plain(lane, from, places.parameter);
}

DEVICE void narrow_parameter(const Lane& lane, const float* from, const UpdatePlaces& places) {
  if (PARAMETER == kUpdateF32) return store_plain(lane, from, places.parameter);
  Four<u16> weights;
  if (PARAMETER == kUpdateBf16) {
    Four<short> remainders;
    for (int k = 0; k < A_LANE; ++k) {
      const SplitNumber all = split(from[k]);
      weights.of[k] = all.weight;
      remainders.of[k] = all.remainder;
    }
    // A direction has no remainder.
    if (places.master != nullptr) lane.store(places.master, remainders);
  } else {
    for (int k = 0; k < A_LANE; ++k) weights.of[k] = F16::narrow(from[k]);
    store_plain(lane, from, places.master);
  }
  lane.store(places.parameter, weights);
}

DEVICE void widen_moment(const Lane& lane, const UpdatePlaces& places, int which, double* to) {
  widen(lane, places.moments[which], MOMENT, to);
}

DEVICE void widen_moment(const Lane& lane, const UpdatePlaces& places, int which, float* to) {
  if (MOMENT != kUpdateEightBit) return widen(lane, places.moments[which], MOMENT, to);
  const float scale = places.scales[which][lane.begin / UPDATE_GROUP];
  if (which == 0) {
    const Four<signed char> codes = lane.load<signed char>(places.moments[which]);
    for (int k = 0; k < A_LANE; ++k) to[k] = unpack_signed(codes.of[k], scale);
  } else {
    const Four<u8> codes = lane.load<u8>(places.moments[which]);
    for (int k = 0; k < A_LANE; ++k) to[k] = unpack_square(codes.of[k], scale);
  }
}

DEVICE void narrow_moment(const Lane& lane, const double* from, const UpdatePlaces& places, int which) {
  store_plain(lane, from, places.moments[which]);
}

DEVICE void narrow_moment(const Lane& lane, const float* from, const UpdatePlaces& places, int which) {
  void* into = places.moments[which];
  if (MOMENT == kUpdateF32) return store_plain(lane, from, into);
  if (MOMENT == kUpdateBf16) {
    Four<u16> numbers;
    for (int k = 0; k < A_LANE; ++k) numbers.of[k] = pack_bf16(from[k]);
    return lane.store(into, numbers);
  }
  // Non-negative floats are ordered as their bits are.
  u32 largest = 0;
  for (int k = 0; k < A_LANE; ++k) {
    const u32 bits = k < lane.count ? bits_of(absolute(from[k])) : 0;
    largest = bits > largest ? bits : largest;
  }
  const float scale = number_of(__reduce_max_sync(ALL_LANES, largest));
  if (threadIdx.x % 32 == 0) places.scales[which][lane.begin / UPDATE_GROUP] = scale;
  if (which == 0) {
    Four<signed char> codes;
    const float factor = to_codes(scale, kSignedCodes);
    for (int k = 0; k < A_LANE; ++k) codes.of[k] = pack_signed(from[k], factor);
    lane.store(into, codes);
  } else {
    Four<u8> codes;
    const float factor = to_codes(scale, kSquareCodes);
    for (int k = 0; k < A_LANE; ++k) codes.of[k] = pack_square(from[k], factor);
    lane.store(into, codes);
  }
}

KERNEL void __launch_bounds__(32 * WARPS) update(const UpdateArguments a) {
  const int tensor = blockIdx.y, lane_number = threadIdx.x % 32;
  const UpdatePlaces& places = a.places[tensor];
  const long long count = a.count[tensor], groups = (count + UPDATE_GROUP - 1) / UPDATE_GROUP;
  const long long first_group = static_cast<long long>(blockIdx.x) * WARPS;
  if (first_group >= groups) return;
  __shared__ StepNumbers<Number> numbers;
  if (threadIdx.x == 0) {
    const double rate = a.rate == nullptr ? a.options.rate : a.options.rate * *a.rate;
    const float step = a.steps[tensor] == nullptr ? 1.0f : *a.steps[tensor] + 1.0f;
    numbers = step_numbers<Number>(a.options, rate, step);
  }
  __syncthreads();
  const StepNumbers<Number> n = numbers;
  for (long long group = first_group + threadIdx.x / 32; group < groups;
       group += static_cast<long long>(gridDim.x) * WARPS) {
    Lane lane;
    lane.begin = group * UPDATE_GROUP + lane_number * A_LANE;
    const long long left = count - lane.begin;
    lane.count = left < 0 ? 0 : left < A_LANE ? static_cast<int>(left) : A_LANE;
    lane.whole = a.aligned[tensor] && lane.count == A_LANE;
    Number p[A_LANE] = {}, g[A_LANE], moments[UPDATE_MOMENTS][A_LANE] = {};
    widen(lane, a.gradients[tensor], a.gradient_kinds[tensor], g);
    if (RULE != kDirection) widen_parameter(lane, places, p);
#pragma unroll
    for (int which = 0; which < UPDATE_MOMENTS; ++which) {
      if (places.moments[which] != nullptr) widen_moment(lane, places, which, moments[which]);
    }
    const bool has_moment = places.moments[0] != nullptr, has_most = places.moments[2] != nullptr;
#pragma unroll
    for (int k = 0; k < A_LANE; ++k) {
      if (RULE == kSgd) {
        sgd(n, has_moment, a.options.nesterov, a.first[tensor], g[k], p[k], moments[0][k]);
      } else if (RULE == kDirection) {
        direction(n, a.options.nesterov, g[k], p[k], moments[0][k]);
      } else {
        Number* most = has_most ? &moments[2][k] : nullptr;
        adam(n, g[k], p[k], moments[0][k], moments[1][k], most);
      }
    }
    narrow_parameter(lane, p, places);
#pragma unroll
    for (int which = 0; which < UPDATE_MOMENTS; ++which) {
      if (places.moments[which] != nullptr) narrow_moment(lane, moments[which], places, which);
    }
  }
}
