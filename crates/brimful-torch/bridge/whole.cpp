// Steps that need a whole matrix: Muon and Adafactor. libtorch computes matrix products, and sums over rows and
// columns, in memory that the caller has allocated. optim.cpp updates the parameter and Muon's momentum. Numbers are
// passed as filled tensors of one element in that memory, because libtorch would allocate one for each number.

#include "guard.h"
#include "mirrored.h"
#include "tensors.h"
#include "update.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/sqrt.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <cmath>

using brimful::guarded;

namespace {

// Scratch memory of a step, handed out from its start.
class Scratch {
 public:
  explicit Scratch(const at::Tensor& all) : all_(all) {}

  at::Tensor take(at::IntArrayRef shape) {
    const auto count = c10::multiply_integers(shape);
    const auto taken = all_.narrow(0, used_, count).view(shape);
    used_ += count;
    return taken;
  }

  // Returns a tensor of one element with this value.
  at::Tensor take(double number) { return take(at::IntArrayRef{}).fill_(number); }

 private:
  at::Tensor all_;
  int64_t used_ = 0;
};

void check_whole(const BrimfulUpdate& u, const at::Tensor& scratch) {
  TORCH_CHECK(
      u.parameter->is_contiguous() && u.gradient->is_contiguous(),
      "a method of whole matrices needs them contiguous, but strides are ", u.parameter->strides(),
      " and ", u.gradient->strides());
  TORCH_CHECK(
      scratch.dim() == 1 && scratch.device() == u.parameter->device() &&
          (scratch.scalar_type() == at::kDouble) == (u.parameter->scalar_type() == at::kDouble),
      "scratch memory must be of the parameter's device and precision");
}

// Subtracts rate times the direction from the parameter, which shrinks by its weight decay.
void step_by(
    const BrimfulUpdate& u, const at::Tensor& direction, UpdateOptions o, const at::Tensor* rate) {
  BrimfulUpdate plain{u.parameter, &direction, u.master, u.step, {}, {}, false};
  o.rule = kSgd;
  o.decoupled = true;
  brimful::update(&plain, 1, o, rate);
}

// Writes the norm of all numbers. On a CPU it is the norm of the rows' norms: for one large sum libtorch's threads
// would allocate memory.
void norm_into(at::Tensor& out, const at::Tensor& all, at::Tensor& rows) {
  const bool has_rows = all.is_cpu() && all.dim() > 1;
  if (has_rows) at::linalg_vector_norm_out(rows, all, 2, at::IntArrayRef{-1}, true);
  at::linalg_vector_norm_out(out, has_rows ? rows : all, 2);
}

}  // namespace

extern "C" {

// Updates one matrix along its orthogonalized momentum. The caller has adjusted the options' rate to the matrix's
// shape, and divided the weight decay by the same factor.
int32_t brimful_muon(
    const BrimfulUpdate* update, const UpdateOptions* options, const BrimfulMuon* muon,
    const at::Tensor* scratch, const at::Tensor* rate, char** message) noexcept {
  return guarded(message, [&] {
    const auto& u = *update;
    check_whole(u, *scratch);
    TORCH_CHECK(u.parameter->dim() == 2, "Muon is for matrices, but got ", u.parameter->sizes());
    if (u.parameter->numel() == 0) return;
    const at::NoGradGuard no_grad;
    const at::AutoDispatchBelowADInplaceOrView untracked;
    const c10::DeviceGuard there(u.parameter->device());
    const auto shape = u.parameter->sizes();
    const bool is_tall = shape[0] > shape[1];
    const int64_t side = std::min(shape[0], shape[1]);
    Scratch memory(*scratch);
    auto x = memory.take(shape), next = memory.take(shape);
    auto gram = memory.take({side, side}), square = memory.take({side, side});
    auto norm = memory.take(1.0), rows = memory.take({shape[0], 1});

    BrimfulUpdate momentum = u;
    momentum.parameter = &x;
    momentum.master = momentum.step = nullptr;
    UpdateOptions o = *options;
    o.rule = kDirection;
    brimful::update(&momentum, 1, o, nullptr);

    // Newton and Schulz's iteration brings all singular values near one, if the norm is at most one at the start.
    norm_into(norm, x, rows);
    x.div_(norm.clamp_min_(muon->eps));
    for (int64_t i = 0; i < muon->steps; ++i) {
      is_tall ? at::mm_out(gram, x.t(), x) : at::mm_out(gram, x, x.t());
      at::addmm_out(square, gram, gram, gram, muon->b, muon->c);
      is_tall ? at::addmm_out(next, x, x, square.t(), muon->a, 1)
              : at::addmm_out(next, x, square, x, muon->a, 1);
      std::swap(x, next);
    }
    step_by(u, x, *options, rate);
  });
}

// Updates one parameter by the averages of its squared gradients: over rows and over columns of its last two
// dimensions, or of each element of a vector.
int32_t brimful_adafactor(
    const BrimfulUpdate* update, const UpdateOptions* options, const BrimfulAdafactor* factored,
    const at::Tensor* scratch, const at::Tensor* rate, char** message) noexcept {
  return guarded(message, [&] {
    const auto& u = *update;
    check_whole(u, *scratch);
    const auto& p = *u.parameter;
    if (p.numel() == 0) return;
    const at::NoGradGuard no_grad;
    const at::AutoDispatchBelowADInplaceOrView untracked;
    const c10::DeviceGuard there(p.device());
    Scratch memory(*scratch);
    const auto shape = p.sizes().vec();
    const bool is_matrix = p.dim() > 1;
    auto rows_shape = shape, columns_shape = shape, mean_shape = shape;
    if (is_matrix) rows_shape.back() = columns_shape.end()[-2] = mean_shape.back() = mean_shape.end()[-2] = 1;
    for (int which = 0; which < (is_matrix ? 2 : 1); ++which) {
      const auto* moment = u.moments[which];
      const auto& wanted = which == 0 ? rows_shape : columns_shape;
      TORCH_CHECK(
          moment != nullptr && moment->sizes() == wanted && moment->is_contiguous() &&
              moment->scalar_type() == scratch->scalar_type() && moment->device() == p.device(),
          "moment ", which, " of Adafactor must be ", wanted, " for a parameter of ", shape);
    }
    auto direction = memory.take(shape), wide = memory.take(shape);
    at::Tensor rows, columns, mean;
    if (is_matrix) {
      rows = memory.take(rows_shape);
      columns = memory.take(columns_shape);
      mean = memory.take(mean_shape);
    }
    const double root = std::sqrt(static_cast<double>(p.numel()));

    // The parameter's root mean square, at least eps2.
    wide.copy_(u.master != nullptr && p.scalar_type() == at::kHalf ? *u.master : p);
    auto size = memory.take(1.0);
    norm_into(size, wide, rows);
    size.mul_(memory.take(1 / root)).clamp_min_(factored->eps2);

    const bool is_read = u.gradient->scalar_type() == scratch->scalar_type();
    if (!is_read) wide.copy_(*u.gradient);
    const auto& g = is_read ? *u.gradient : wide;
    auto step = memory.take(0.0);
    step.copy_(*u.step).add_(memory.take(1.0));
    auto share = memory.take(0.0);
    share.copy_(step).pow_(factored->beta2_decay);
    const auto follow = [&](const at::Tensor& average, at::Tensor& norms, int64_t dim) {
      at::linalg_vector_norm_out(norms, g, 2, at::IntArrayRef{dim}, true);
      norms.mul_(norms).mul_(memory.take(1.0 / static_cast<double>(g.size(dim))));
      average.lerp_(norms, share);
    };
    if (is_matrix) {
      const auto &row = *u.moments[0], &column = *u.moments[1];
      follow(row, rows, -1);
      follow(column, columns, -2);
      at::mul_out(direction, row, column);
      // Mean of the row averages, from their 1-norm: libtorch's `mean` allocates.
      at::linalg_vector_norm_out(mean, row, 1, at::IntArrayRef{-2}, true);
      mean.mul_(memory.take(1.0 / static_cast<double>(row.size(-2))));
      direction.div_(mean.clamp_min_(factored->eps1));
    } else {
      at::mul_out(direction, g, g);
      u.moments[0]->lerp_(direction, share);
      direction.copy_(*u.moments[0]);
    }
    direction.clamp_min_(factored->eps1 * factored->eps1).rsqrt_().mul_(g);

    // The effective rate is min(rate, 1/√step) times the parameter's size. `step_by` multiplies by the rate, so `given`
    // becomes min(1, 1/(rate·√step)). A direction whose root mean square exceeds the threshold is shortened to it.
    auto given = memory.take(options->rate);
    if (rate != nullptr) {
      auto factor = memory.take(0.0);
      given.mul_(factor.copy_(*rate));
    }
    given.mul_(step.sqrt_()).reciprocal_().clamp_max_(1.0);
    auto length = memory.take(1.0);
    norm_into(length, direction, rows);
    length.mul_(memory.take(1 / (root * factored->threshold))).clamp_min_(1.0);
    direction.mul_(size.mul_(given).div_(length));
    step_by(u, direction, *options, rate);
  });
}

}  // extern "C"
