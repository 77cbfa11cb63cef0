// Arithmetic of an optimizer's step, for kernels/update.cu and for CPUs (bridge/host_update.cpp): the same operations
// in the same order, none contracted by the compiler, so that both give the same bits.
#pragma once

// Defined outside: SHARED, and the operations product, multiply_add, quotient, root, absolute, largest_of,
// bits_of, number_of and whole_of.

// f32 master, split into the bf16 weight that it rounds to (ties away from zero) and a remainder:
//
//   bits = weight · 2^16 + remainder,   -2^15 ≤ remainder < 2^15
struct SplitNumber {
  unsigned short weight;
  short remainder;
};

SHARED SplitNumber split(float master) {
  const unsigned bits = bits_of(master);
  const unsigned weight = (bits + 0x8000u) >> 16;
  // Rounding would wrap the largest NaNs around to zero, and turn others into infinity.
  const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  SplitNumber all;
  all.weight = static_cast<unsigned short>(is_nan ? bits >> 16 | 0x40u : weight);
  all.remainder = static_cast<short>(is_nan ? 0u : bits - (weight << 16));
  return all;
}

SHARED float join(unsigned short weight, short remainder) {
  const unsigned size = weight & 0x7fffu;
  // If a caller has set the weight to zero or infinity, the remainder of the old weight could make a NaN.
  const bool is_beyond = (size == 0u && remainder < 0) || (size == 0x7f80u && remainder > 0);
  const unsigned low = static_cast<unsigned>(static_cast<int>(remainder));
  return number_of((static_cast<unsigned>(weight) << 16) + (is_beyond ? 0u : low));
}

SHARED float widen_bf16(unsigned short number) { return number_of(static_cast<unsigned>(number) << 16); }

// Returns a random number for stochastic rounding, which lets an average change even if each step changes it by less
// than one code. It is a hash of the number itself, so a step does not depend on where and when it runs.
SHARED unsigned random_of(float number) {
  unsigned hash = bits_of(number) * 0x9e3779b1u;
  hash = (hash ^ (hash >> 16)) * 0x85ebca6bu;
  return hash ^ (hash >> 13);
}

// Returns true with a probability of part / whole.
SHARED bool happens(float part, float whole, float number) {
  const float random = product(static_cast<float>(random_of(number) >> 8), 1.0f / 16777216.0f);
  return product(random, whole) < part;
}

SHARED unsigned short pack_bf16(float number) {
  const unsigned bits = bits_of(number);
  const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  const unsigned rounded = (bits + (random_of(number) & 0xffffu)) >> 16;
  return static_cast<unsigned short>(is_nan ? bits >> 16 | 0x40u : rounded);
}

// 8-bit codes of a group. The group's largest absolute value is its `scale`, and has the largest code. Codes of
// signed numbers follow the square root of number / scale. Codes of squares follow the fourth root, because
// squares span twice as many orders of magnitude.
constexpr float kSignedCodes = 127.0f * 127.0f, kSquareCodes = 65025.0f * 65025.0f;

// Returns the factor that turns numbers into powers of their codes; 0 for a tiny scale, where it would overflow.
SHARED float to_codes(float scale, float codes) {
  return scale > 1e-28f ? quotient(codes, scale) : 0.0f;
}

SHARED signed char pack_signed(float number, float factor) {
  const float power = product(absolute(number), factor);
  const int whole = whole_of(root(power));
  const int code = whole < 126 ? whole : 126;
  const float rest = power - static_cast<float>(code * code);
  const int rounded = happens(rest, static_cast<float>(2 * code + 1), number) ? code + 1 : code;
  return static_cast<signed char>(number < 0.0f ? -rounded : rounded);
}

SHARED float unpack_signed(signed char code, float scale) {
  const int number = code;
  return product(static_cast<float>(number < 0 ? -number * number : number * number),
                 quotient(scale, kSignedCodes));
}

SHARED float fourth_power(int number) {
  const float square = static_cast<float>(number * number);
  return product(square, square);
}

SHARED unsigned char pack_square(float number, float factor) {
  const float power = product(number, factor);
  const int whole = whole_of(root(root(power)));
  const int code = whole < 254 ? whole : 254;
  const float low = fourth_power(code);
  const int rounded = happens(power - low, fourth_power(code + 1) - low, number) ? code + 1 : code;
  // The code is never zero for a number above zero, because a step divides by the number's root.
  return static_cast<unsigned char>(number > 0.0f && rounded == 0 ? 1 : rounded);
}

SHARED float unpack_square(unsigned char code, float scale) {
  return product(fourth_power(code), quotient(scale, kSquareCodes));
}

// Coefficients of a step, the same for every element.
template <class Number>
struct StepNumbers {
  // Weight decay: share of the parameter added to the gradient, and factor that shrinks the parameter.
  Number decay, shrink;
  Number rate;
  // Decay of the first moment, and weight of the gradient in it.
  Number kept, added;
  Number square_kept, square_added;
  // Bias correction of the squares' root: 1/√(1 − beta2^step).
  Number correction;
  Number eps, step_size;
};

// Computes a power by multiplications, because the libraries of hosts and devices round their `pow` differently.
SHARED double power(double base, long long exponent) {
  double result = 1.0;
  for (; exponent > 0; exponent /= 2) {
    if (exponent % 2 == 1) result = product(result, base);
    base = product(base, base);
  }
  return result;
}

// Computes the coefficients for this rate and step number, counted from 1.
template <class Number>
SHARED StepNumbers<Number> step_numbers(const UpdateOptions& o, double rate, float step) {
  StepNumbers<Number> n;
  n.decay = static_cast<Number>(o.decoupled ? 0.0 : o.weight_decay);
  n.shrink = static_cast<Number>(o.decoupled ? multiply_add(-rate, o.weight_decay, 1.0) : 1.0);
  n.rate = static_cast<Number>(rate);
  n.kept = static_cast<Number>(o.beta1);
  n.added = static_cast<Number>(1.0 - (o.rule == kSgd ? o.beta2 : o.beta1));
  n.square_kept = static_cast<Number>(o.beta2);
  n.square_added = static_cast<Number>(1.0 - o.beta2);
  n.eps = static_cast<Number>(o.eps);
  n.correction = n.step_size = 1;
  if (o.rule == kAdam) {
    const auto steps = static_cast<long long>(step);
    n.correction = static_cast<Number>(quotient(1.0, root(1.0 - power(o.beta2, steps))));
    n.step_size = static_cast<Number>(quotient(rate, 1.0 - power(o.beta1, steps)));
  }
  return n;
}

// Updates one parameter and its moment, or the parameter alone without momentum.
template <class Number>
SHARED void sgd(
    const StepNumbers<Number>& n, bool has_momentum, bool nesterov, bool first, Number gradient,
    Number& parameter, Number& moment) {
  Number direction = n.decay == 0 ? gradient : multiply_add(parameter, n.decay, gradient);
  if (has_momentum) {
    moment = first ? direction : multiply_add(moment, n.kept, product(direction, n.added));
    direction = nesterov ? multiply_add(moment, n.kept, direction) : moment;
  }
  parameter = multiply_add(-n.rate, direction, product(parameter, n.shrink));
}

// Updates one parameter and its averages. `largest` is amsgrad's largest square so far; null without amsgrad.
template <class Number>
SHARED void adam(
    const StepNumbers<Number>& n, Number gradient, Number& parameter, Number& average, Number& square,
    Number* largest) {
  const Number g = n.decay == 0 ? gradient : multiply_add(parameter, n.decay, gradient);
  average = multiply_add(n.added, g - average, average);
  square = multiply_add(product(n.square_added, g), g, product(square, n.square_kept));
  Number divisor = square;
  if (largest != nullptr) divisor = *largest = largest_of(*largest, square);
  divisor = multiply_add(root(divisor), n.correction, n.eps);
  parameter = multiply_add(parameter, n.shrink, -quotient(product(n.step_size, average), divisor));
}

// Writes Muon's direction in the parameter's place.
template <class Number>
SHARED void direction(
    const StepNumbers<Number>& n, bool nesterov, Number gradient, Number& out, Number& moment) {
  moment = multiply_add(n.added, gradient - moment, moment);
  out = nesterov ? multiply_add(n.added, gradient - moment, moment) : moment;
}
