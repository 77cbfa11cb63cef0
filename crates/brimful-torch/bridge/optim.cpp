// Optimizer steps on many parameters, in place: by our kernel on a GPU, by our loops on a CPU, and
// by libtorch's operations where the kernel is not available.
//
// Kernel, loops and operations all walk raw memory for the parameter's number of elements. So gradient and state
// must have the parameter's shape and strides.

#include "guard.h"
#include "host_update.h"
#include "kernel_tensors.h"
#include "mirrored.h"
#include "tensors.h"
#include "update.h"

#include <ATen/Parallel.h>
#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/as_strided.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/pow.h>
#include <ATen/ops/where.h>

#include <algorithm>

using brimful::guarded;
using brimful::HostUpdate;

namespace {

// Elements in a thread's share of the work.
constexpr int64_t kShare = 32768;
static_assert(kShare % UPDATE_GROUP == 0, "a share has whole groups");

bool fits(const at::Tensor& parameter, const at::Tensor& other) {
  return parameter.layout() == at::kStrided && other.layout() == at::kStrided &&
         parameter.is_non_overlapping_and_dense() && parameter.device() == other.device() &&
         parameter.sizes() == other.sizes() && parameter.strides() == other.strides();
}

UpdateKind kind_of(const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kFloat: return kUpdateF32;
    case at::kBFloat16: return kUpdateBf16;
    case at::kHalf: return kUpdateF16;
    case at::kDouble: return kUpdateF64;
    case at::kChar:
    case at::kByte: return kUpdateEightBit;
    default: TORCH_CHECK(false, "an optimizer cannot update ", tensor.toString());
  }
}

UpdateKind moment_kind(const BrimfulUpdate& update) {
  const auto* moment = update.moments[0];
  return moment == nullptr ? kind_of(*update.parameter) : kind_of(*moment);
}

int64_t groups_of(const at::Tensor& tensor) {
  return (tensor.numel() + UPDATE_GROUP - 1) / UPDATE_GROUP;
}

void check(const at::Tensor& parameter, const at::Tensor* other, const char* what) {
  if (other == nullptr) return;
  TORCH_CHECK(
      fits(parameter, *other), what, " (", other->toString(), other->sizes(), ", strides ",
      other->strides(), ") is not laid out as its parameter (", parameter.toString(),
      parameter.sizes(), ", strides ", parameter.strides(), "), or that is not dense");
}

// Checks all tensors of an update: loops and kernels read them by address, without any check.
void check(const BrimfulUpdate& u, int rule) {
  const at::Tensor& parameter = *u.parameter;
  check(parameter, u.parameter, "parameter");
  check(parameter, u.gradient, "gradient");
  check(parameter, u.master, "master");
  const auto kind = kind_of(parameter);
  TORCH_CHECK(
      kind != kUpdateEightBit && (kind != kUpdateF16 || rule != kDirection),
      "an optimizer cannot update ", parameter.toString());
  TORCH_CHECK(
      kind_of(*u.gradient) != kUpdateEightBit &&
          (kind_of(*u.gradient) == kUpdateF64) == (kind == kUpdateF64),
      "a gradient of ", u.gradient->toString(), " cannot update ", parameter.toString());
  // A direction is no parameter, so it has no master.
  const bool has_master = (kind == kUpdateBf16 || kind == kUpdateF16) && rule != kDirection;
  const auto wanted = kind == kUpdateBf16 ? at::kShort : at::kFloat;
  TORCH_CHECK(
      has_master == (u.master != nullptr) && (!has_master || u.master->scalar_type() == wanted),
      "a parameter of ", parameter.toString(), " needs its master, and no other has one");
  for (int which = 0; which < UPDATE_MOMENTS && u.moments[which] != nullptr; ++which) {
    check(parameter, u.moments[which], "moment");
    const auto of = u.moments[which]->scalar_type();
    const bool is_eight_bit = u.scales[which] != nullptr;
    const bool is_known = is_eight_bit ? of == (which == 0 ? at::kChar : at::kByte)
                                       : of == (kind == kUpdateF64 ? at::kDouble : at::kFloat) ||
                                             (of == at::kBFloat16 && kind != kUpdateF64);
    TORCH_CHECK(is_known, "a moment of ", parameter.toString(), " cannot be ", at::toString(of));
    if (!is_eight_bit) continue;
    const auto& scales = *u.scales[which];
    TORCH_CHECK(
        scales.is_contiguous() && scales.scalar_type() == at::kFloat &&
            scales.device() == parameter.device() && scales.numel() == groups_of(parameter),
        "an 8-bit moment needs ", groups_of(parameter), " scales, but has ", scales.numel());
  }
  TORCH_CHECK(
      u.step == nullptr || (u.step->dim() == 0 && u.step->scalar_type() == at::kFloat &&
                            u.step->device() == parameter.device()),
      "a step counter must be one f32 on its parameter's device");
}

// Checks the rate, which a kernel reads by address without any check.
void check_rate(const at::Tensor* rate, const at::Tensor& parameter) {
  if (rate == nullptr) return;
  TORCH_CHECK(
      rate->dim() == 0 && rate->scalar_type() == at::kFloat &&
          rate->device() == parameter.device(),
      "a learning rate must be one f32 on the parameters' device, but is ", rate->toString(),
      rate->sizes(), " on ", rate->device());
}

UpdatePlaces places_of(const BrimfulUpdate& u) {
  UpdatePlaces places{};
  places.parameter = u.parameter->data_ptr();
  places.master = u.master == nullptr ? nullptr : u.master->data_ptr();
  for (int which = 0; which < UPDATE_MOMENTS && u.moments[which] != nullptr; ++which) {
    places.moments[which] = u.moments[which]->data_ptr();
    if (u.scales[which] != nullptr) places.scales[which] = u.scales[which]->data_ptr<float>();
  }
  return places;
}

void update_on_host(
    const BrimfulUpdate& now, const UpdateOptions& o, const at::Tensor* rate) {
  const int64_t count = now.parameter->numel();
  const HostUpdate update{
      places_of(now),
      now.gradient->const_data_ptr(),
      kind_of(*now.parameter),
      kind_of(*now.gradient),
      moment_kind(now),
      now.first,
      rate == nullptr ? o.rate : o.rate * *rate->const_data_ptr<float>(),
      now.step == nullptr ? 1.0F : *now.step->const_data_ptr<float>() + 1.0F};
  at::parallel_for(0, (count + kShare - 1) / kShare, 1, [&](int64_t first, int64_t last) {
    brimful::host_update(o, update, first * kShare, std::min(last * kShare, count));
  });
}

// Takes the step with the kernel, for at most UPDATED_AT_ONCE parameters of one dtype.
void update_by_kernel(
    const BrimfulUpdate* all, size_t count, const UpdateOptions& o, const at::Tensor* rate) {
  const auto parameter = kind_of(*all[0].parameter), moment = moment_kind(all[0]);
  UpdateArguments a{};
  a.options = o;
  a.rate = rate == nullptr ? nullptr : rate->const_data_ptr<float>();
  for (size_t i = 0; i < count; ++i) {
    const auto& u = all[i];
    a.places[i] = places_of(u);
    a.gradients[i] = u.gradient->const_data_ptr();
    a.steps[i] = u.step == nullptr ? nullptr : u.step->const_data_ptr<float>();
    a.count[i] = u.parameter->numel();
    a.gradient_kinds[i] = static_cast<unsigned char>(kind_of(*u.gradient));
    a.first[i] = u.first;
    a.aligned[i] = true;
    for (const auto* tensor : {u.parameter, u.gradient, u.master, u.moments[0], u.moments[1], u.moments[2]}) {
      a.aligned[i] &= tensor == nullptr || brimful::kernels::is_aligned(*tensor);
    }
  }
  brimful::kernels::functions()->update(a, parameter, moment, static_cast<int>(count));
}

// Returns a flat view in memory order.
at::Tensor flat(const at::Tensor& tensor) {
  return tensor.detach().as_strided({tensor.numel()}, {1});
}

// Returns the numbers of an 8-bit moment by groups, padded with zeros.
at::Tensor by_groups(const at::Tensor& tensor) {
  const auto numbers = flat(tensor).to(at::kFloat);
  const int64_t rest = groups_of(tensor) * UPDATE_GROUP - tensor.numel();
  return at::constant_pad_nd(numbers, {0, rest}).view({-1, UPDATE_GROUP});
}

// Returns a moment in f32, or f64, in memory order.
at::Tensor unpacked(const at::Tensor& moment, const at::Tensor* scales) {
  if (scales == nullptr) {
    return flat(moment).to(moment.scalar_type() == at::kDouble ? at::kDouble : at::kFloat);
  }
  const auto codes = by_groups(moment);
  const auto shares = moment.scalar_type() == at::kChar ? codes.mul(codes.abs()).div(16129)
                                                        : codes.div(255).square().square();
  return shares.mul(scales->unsqueeze(1)).flatten().narrow(0, 0, moment.numel());
}

// Writes numbers in memory order to a moment, rounded to nearest.
void pack(const at::Tensor& numbers, const at::Tensor& moment, const at::Tensor* scales) {
  if (scales == nullptr) {
    flat(moment).copy_(numbers);
    return;
  }
  const auto groups = by_groups(numbers);
  scales->copy_(groups.abs().amax(1));
  const auto shares = groups.div(scales->unsqueeze(1)).nan_to_num(0);
  auto codes = moment.scalar_type() == at::kChar
                   ? shares.abs().sqrt().mul(127).round().mul(shares.sign())
                   : shares.sqrt().sqrt().mul(255).round().clamp_min(1).mul(shares.sign());
  flat(moment).copy_(codes.flatten().narrow(0, 0, moment.numel()));
}

at::Tensor joined(const BrimfulUpdate& u) {
  const auto weight = flat(*u.parameter);
  if (u.master == nullptr) return weight.to(brimful::sum_kind(weight.scalar_type()), /*non_blocking=*/false, /*copy=*/true);
  if (u.master->scalar_type() == at::kFloat) return flat(*u.master).clone();
  const auto high = weight.view(at::kShort).to(at::kInt);
  const auto low = flat(*u.master).to(at::kInt), size = high.bitwise_and(0x7fff);
  const auto is_beyond =
      size.eq(0).logical_and(low.lt(0)).logical_or(size.eq(0x7f80).logical_and(low.gt(0)));
  return high.bitwise_left_shift(16).add(low.masked_fill(is_beyond, 0)).view(at::kFloat);
}

void put(const at::Tensor& number, const BrimfulUpdate& u) {
  if (u.master == nullptr || u.master->scalar_type() == at::kFloat) {
    flat(*u.parameter).copy_(number);
    if (u.master != nullptr) flat(*u.master).copy_(number);
    return;
  }
  const auto bits = number.view(at::kInt), high = bits.add(0x8000).bitwise_right_shift(16);
  const auto is_nan = number.isnan();
  const auto weight = at::where(is_nan, bits.bitwise_right_shift(16).bitwise_or(0x40), high);
  flat(*u.parameter).view(at::kShort).copy_(weight);
  flat(*u.master).copy_(bits.sub(high.bitwise_left_shift(16)).masked_fill(is_nan, 0));
}

// Takes the step of one parameter with libtorch's operations, by the rules of kernels/update_math.h.
void update_by_libtorch(const BrimfulUpdate& u, const UpdateOptions& o, const at::Tensor* given) {
  auto p = joined(u);
  const auto rate = given == nullptr ? at::full({}, o.rate, p.options().dtype(at::kDouble))
                                     : given->to(at::kDouble).mul(o.rate);
  auto g = flat(*u.gradient).to(p.scalar_type());
  at::Tensor moments[UPDATE_MOMENTS];
  for (int which = 0; which < UPDATE_MOMENTS && u.moments[which] != nullptr; ++which) {
    moments[which] = unpacked(*u.moments[which], u.scales[which]);
  }
  auto& [m, v, most] = moments;
  if (!o.decoupled) g = g.add(p, o.weight_decay);
  if (o.decoupled) p.mul_(1 - rate * o.weight_decay);
  if (o.rule == kSgd) {
    if (m.defined()) m = u.first ? g.clone() : m.mul(o.beta1).add(g, 1 - o.beta2);
    if (m.defined()) g = o.nesterov ? g.add(m, o.beta1) : m;
    p.sub_(g.mul(rate));
  } else if (o.rule == kDirection) {
    m = m.lerp(g, 1 - o.beta1);
    p = o.nesterov ? g.lerp(m, o.beta1) : m;
  } else {
    const auto before = u.step == nullptr ? at::full({}, 0.0, p.options().dtype(at::kDouble))
                                          : u.step->to(at::kDouble);
    const auto step = before.add(1);
    m = m.lerp(g, 1 - o.beta1);
    v = v.mul(o.beta2).addcmul(g, g, 1 - o.beta2);
    if (most.defined()) most = at::maximum(most, v);
    const auto divisor = (most.defined() ? most : v).sqrt().div((1 - at::pow(o.beta2, step)).sqrt()).add(o.eps);
    p.sub_(m.mul(rate / (1 - at::pow(o.beta1, step))).div(divisor));
  }
  put(p, u);
  for (int which = 0; which < UPDATE_MOMENTS && u.moments[which] != nullptr; ++which) {
    pack(moments[which], *u.moments[which], u.scales[which]);
  }
}

void update_on_device(
    const BrimfulUpdate* all, size_t count, const UpdateOptions& o, const at::Tensor* rate) {
  const brimful::kernels::OwnWork own(*all[0].parameter);
  for (size_t i = 1; i < count; ++i) {
    const at::Tensor &one = *all[0].parameter, &other = *all[i].parameter;
    TORCH_CHECK(
        one.device() == other.device() && kind_of(one) == kind_of(other) &&
            moment_kind(all[0]) == moment_kind(all[i]),
        "one update is of parameters alike in device and dtypes, but one is of ", one.toString(), " on ",
        one.device(), " and one of ", other.toString(), " on ", other.device());
  }
  for (size_t first = 0; first < count; first += UPDATED_AT_ONCE) {
    const size_t some = std::min<size_t>(count - first, UPDATED_AT_ONCE);
    const auto by_libtorch = [&] {
      for (size_t i = first; i < first + some; ++i) update_by_libtorch(all[i], o, rate);
    };
    if (brimful::kernels::functions_for(*all[0].parameter) == nullptr) {
      by_libtorch();
    } else {
      brimful::kernels::or_else(
          "an optimizer's step", [&] { update_by_kernel(all + first, some, o, rate); },
          by_libtorch);
    }
  }
}

// Increments the step counters after an update has read them. No two parameters share a counter. On a CPU `add_` would
// allocate a tensor for its operand, but nothing may fail here.
void advance(const BrimfulUpdate* all, size_t count) {
  std::vector<at::Tensor> on_device;
  for (size_t i = 0; i < count; ++i) {
    if (all[i].step == nullptr) continue;
    if (all[i].step->is_cpu()) {
      *all[i].step->data_ptr<float>() += 1.0F;
    } else {
      on_device.push_back(*all[i].step);
    }
  }
  if (!on_device.empty()) at::_foreach_add_(on_device, 1.0);
}

}  // namespace

void brimful::update(
    const BrimfulUpdate* all, size_t count, const UpdateOptions& options, const at::Tensor* rate) {
  if (count == 0) return;
  for (size_t i = 0; i < count; ++i) check(all[i], options.rule);
  const at::Tensor& first = *all[0].parameter;
  check_rate(rate, first);
  if (first.is_cpu()) {
    for (size_t i = 0; i < count; ++i) update_on_host(all[i], options, rate);
  } else {
    update_on_device(all, count, options, rate);
  }
  advance(all, count);
  // Autograd, and any code that caches copies of parameters, relies on their versions.
  for (size_t i = 0; i < count; ++i) count_change(*all[i].parameter);
}

extern "C" {

bool brimful_fits(const at::Tensor* parameter, const at::Tensor* other) noexcept {
  return fits(*parameter, *other);
}

int32_t brimful_update(
    const BrimfulUpdate* all, size_t count, const UpdateOptions* options, const at::Tensor* rate,
    char** message) noexcept {
  return guarded(message, [&] {
    const at::NoGradGuard no_grad;
    brimful::update(all, count, *options, rate);
  });
}

// Returns an 8-bit moment in f32, with its shape and strides.
int32_t brimful_unpack_moment(
    const at::Tensor* moment, const at::Tensor* scales, at::Tensor** out, char** message) noexcept {
  return guarded(message, [&] {
    const at::NoGradGuard no_grad;
    auto numbers = at::empty_like(*moment, moment->options().dtype(at::kFloat));
    flat(numbers).copy_(unpacked(*moment, scales));
    *out = new at::Tensor(std::move(numbers));
  });
}

// Writes f32 numbers to an 8-bit moment of the same strides, rounded to nearest.
int32_t brimful_pack_moment(
    const at::Tensor* numbers, const at::Tensor* moment, const at::Tensor* scales,
    char** message) noexcept {
  return guarded(message, [&] {
    const at::NoGradGuard no_grad;
    check(*moment, numbers, "numbers");
    pack(flat(*numbers), *moment, scales);
  });
}

}  // extern "C"
