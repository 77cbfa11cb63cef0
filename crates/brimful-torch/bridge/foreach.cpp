// Foreach operations: a few kernel launches for many tensors instead of one per tensor.
//
// libtorch itself falls back to a loop if tensors differ in device, dtype or memory format.

#include "guard.h"
#include "tensors.h"

#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/_foreach_zero.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <utility>

using brimful::guarded;
using brimful::list_of;

namespace {

// Calls `body` once for each device and dtype, with the tensors that have them. A foreach operation on such a list
// is fast, and its other operand can have the same device and dtype.
template <class Body>
void for_each_alike(const std::vector<at::Tensor>& tensors, Body&& body) {
  std::vector<bool> done(tensors.size(), false);
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (done[i]) continue;
    std::vector<at::Tensor> alike;
    for (size_t j = i; j < tensors.size(); ++j) {
      if (tensors[j].scalar_type() != tensors[i].scalar_type()) continue;
      if (tensors[j].device() != tensors[i].device()) continue;
      alike.push_back(tensors[j]);
      done[j] = true;
    }
    body(alike);
  }
}

// Returns the norm of all tensors as one vector, of order 2, or of order infinity for the largest absolute value.
at::Tensor global_norm(std::vector<at::Tensor> tensors, double order) {
  TORCH_CHECK(!tensors.empty(), "the norm of no tensors is not defined");
  const auto first = tensors[0];
  // libtorch has no maximum of an empty tensor.
  const auto is_empty = [](const at::Tensor& tensor) { return tensor.numel() == 0; };
  tensors.erase(std::remove_if(tensors.begin(), tensors.end(), is_empty), tensors.end());
  if (tensors.empty()) {
    return at::zeros({}, first.options().dtype(brimful::sum_kind(first.scalar_type())));
  }
  std::vector<at::Tensor> norms;
  for_each_alike(tensors, [&](const std::vector<at::Tensor>& alike) {
    // A sum of squares overflows f16 and loses precision in bf16.
    const auto some = at::_foreach_norm(alike, order, brimful::sum_kind(alike[0].scalar_type()));
    norms.insert(norms.end(), some.begin(), some.end());
  });
  auto kind = norms[0].scalar_type();
  for (const auto& norm : norms) kind = c10::promoteTypes(kind, norm.scalar_type());
  for (auto& norm : norms) norm = norm.to(first.device(), kind);
  return at::linalg_vector_norm(at::stack(norms), order);
}

}  // namespace

extern "C" {

int32_t brimful_foreach_scale(
    const at::Tensor* const* tensors, size_t count, double factor, char** message) noexcept {
  return guarded(message, [&] {
    const at::NoGradGuard no_grad;
    if (count == 0) return;
    // On a CPU, each product with a number allocates a tensor for the number. If memory ran out half-way, only
    // some tensors would be scaled. So one tensor per dtype is made before the first product; not in half
    // precision, where the factor would be rounded.
    std::vector<std::pair<std::vector<at::Tensor>, at::Tensor>> groups;
    for_each_alike(list_of(tensors, count), [&](const std::vector<at::Tensor>& alike) {
      const auto& one = alike[0];
      const bool is_exact = one.scalar_type() == at::kFloat || one.scalar_type() == at::kDouble;
      const bool made = one.is_cpu() && is_exact;
      groups.emplace_back(alike, made ? at::scalar_tensor(factor, one.options()) : at::Tensor());
    });
    for (const auto& [alike, by] : groups) {
      if (by.defined()) {
        at::_foreach_mul_(alike, by);
      } else {
        at::_foreach_mul_(alike, factor);
      }
    }
  });
}

int32_t brimful_foreach_scale_by(
    const at::Tensor* const* tensors, size_t count, const at::Tensor* factor,
    char** message) noexcept {
  return guarded(message, [&] {
    const at::NoGradGuard no_grad;
    TORCH_CHECK(factor->dim() == 0, "a factor must be a 0-dim tensor, but has ", factor->sizes());
    for_each_alike(list_of(tensors, count), [&](const std::vector<at::Tensor>& alike) {
      const auto& one = alike[0];
      at::_foreach_mul_(alike, factor->to(one.device(), one.scalar_type()));
    });
  });
}

int32_t brimful_foreach_add(
    const at::Tensor* const* into, const at::Tensor* const* what, size_t count, double factor,
    char** message) noexcept {
  return guarded(message, [&] {
    const at::NoGradGuard no_grad;
    if (count > 0) at::_foreach_add_(list_of(into, count), list_of(what, count), factor);
  });
}

int32_t brimful_foreach_copy(
    const at::Tensor* const* into, const at::Tensor* const* from, size_t count,
    char** message) noexcept {
  return guarded(message, [&] {
    const at::NoGradGuard no_grad;
    if (count > 0) at::_foreach_copy_(list_of(into, count), list_of(from, count));
  });
}

int32_t brimful_foreach_zero(
    const at::Tensor* const* tensors, size_t count, char** message) noexcept {
  return guarded(message, [&] {
    const at::NoGradGuard no_grad;
    if (count > 0) at::_foreach_zero_(list_of(tensors, count));
  });
}

int32_t brimful_foreach_norm(
    const at::Tensor* const* tensors, size_t count, double order, at::Tensor** out,
    char** message) noexcept {
  return guarded(message, [&] {
    const at::NoGradGuard no_grad;
    *out = new at::Tensor(global_norm(list_of(tensors, count), order));
  });
}

}  // extern "C"
