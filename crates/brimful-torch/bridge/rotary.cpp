// Rotary position embedding: in a custom kernel where available, else in libtorch's operations.

#include "guard.h"
#include "kernel_node.h"
#include "kernel_tensors.h"
#include "tensors.h"
#include "touched.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty_like.h>

using namespace brimful::kernels;

namespace {

// Angles of all positions, sequence × half of a head's width.
struct Angles {
  at::Tensor cos, sin;
};

at::Tensor by_libtorch(const at::Tensor& x, const Angles& angles, double sign) {
  const auto wide = brimful::sum_kind(x.scalar_type());
  const auto halves = x.to(wide).chunk(2, -1);
  const auto cos = angles.cos.unsqueeze(1).to(wide);
  const auto sin = angles.sin.unsqueeze(1).to(wide).mul(sign);
  const auto first = halves[0].mul(cos).sub(halves[1].mul(sin));
  const auto second = halves[1].mul(cos).add(halves[0].mul(sin));
  return at::cat({first, second}, -1).to(x.scalar_type());
}

// Throws a KernelError if the kernel is not available. Angles are contiguous f32.
at::Tensor by_kernel(const at::Tensor& given, const Angles& angles, float sign) {
  const OwnWork own(given);
  brimful::report("brimful::rotary", {sign}, {&given, &angles.cos, &angles.sin}, {});
  const auto x = laid_out(given);
  auto out = at::empty_like(x);
  functions()->rotary(
      {x.const_data_ptr(), angles.cos.const_data_ptr<float>(), angles.sin.const_data_ptr<float>(),
       out.mutable_data_ptr(), x.numel() / 2, static_cast<int>(x.size(1)),
       static_cast<int>(x.size(2)), static_cast<int>(x.size(3) / 2), sign},
      number_kind(x));
  return out;
}

at::Tensor turned(const at::Tensor& x, const Angles& angles, float sign) {
  return or_else(
      "rotary positions", [&] { return by_kernel(x, angles, sign); },
      [&] { return by_libtorch(x, angles, sign); });
}

struct RotaryNode final : KernelNode {
  std::string name() const override { return "BrimfulRotaryBackward"; }
  const char* what() const override { return "rotary positions"; }
  void let_go() override {
    cos.reset_data();
    sin.reset_data();
  }

  variable_list backward(variable_list&& gradients) override {
    variable_list out(1);
    if (gradients[0].defined()) out[0] = turned(gradients[0], {cos.unpack(), sin.unpack()}, -1);
    return out;
  }

  SavedVariable cos, sin;
};

at::Tensor rotary(const at::Tensor& x, const Angles& given) {
  // The node computes no gradients of angles, which are seldom trained.
  const bool is_ours = takes(x) && x.numel() > 0 && !compute_requires_grad(given.cos, given.sin);
  if (!is_ours) return by_libtorch(x, given, 1);
  const auto plain = [](const at::Tensor& table) { return table.to(at::kFloat).contiguous(); };
  const Angles angles{plain(given.cos), plain(given.sin)};
  if (!compute_requires_grad(x)) return turned(x, angles, 1);
  const auto node = node_after<RotaryNode>(x);
  node->cos = SavedVariable(angles.cos, false);
  node->sin = SavedVariable(angles.sin, false);
  return with_history(node, [&] { return turned(x, angles, 1); });
}

}  // namespace

extern "C" {

// Input is samples × sequence × heads × width; both tables are sequence × width/2, in f32 or x's dtype.
int32_t brimful_rotary(
    const at::Tensor* x, const at::Tensor* cos, const at::Tensor* sin, at::Tensor** out,
    char** message) noexcept {
  return brimful::guarded(message, [&] {
    TORCH_CHECK(
        x->dim() == 4 && x->size(3) % 2 == 0,
        "rotary positions are for samples × sequence × heads × an even width, but got ", x->sizes());
    const std::vector<int64_t> wanted{x->size(1), x->size(3) / 2};
    for (const auto* table : {cos, sin}) {
      TORCH_CHECK(
          table->sizes() == wanted && table->device() == x->device(),
          "the angles of rotary positions must be ", wanted, " on ", x->device(), ", but are ",
          table->sizes(), " on ", table->device());
    }
    *out = new at::Tensor(rotary(*x, {*cos, *sin}));
  });
}

}  // extern "C"
