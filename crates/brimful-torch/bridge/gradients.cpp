// Transfers the gradients of a backward out of their parameters, into sums.
//
// Autograd would add each gradient to the present one with a separate kernel, and launches dominate the time of
// small micro-batches. Added as lists, all gradients take a few kernels. Half-precision gradients can then be
// summed in f32, too.

#include "guard.h"
#include "kernel_tensors.h"
#include "owned_gradients.h"
#include "tensors.h"

#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/DeviceGuard.h>

#include <unordered_set>

using brimful::guarded;
using brimful::is_half;

namespace {

at::Tensor empty_sum(const at::Tensor& gradient) {
  return at::empty_like(gradient, gradient.options().dtype(at::kFloat));
}

// Returns whether a custom kernel can walk both tensors in the same order.
bool is_alike_in_memory(const at::Tensor& sum, const at::Tensor& gradient) {
  using brimful::kernels::is_aligned;
  return sum.scalar_type() == at::kFloat && sum.strides() == gradient.strides() &&
         sum.is_non_overlapping_and_dense() && is_aligned(sum) && is_aligned(gradient);
}

// Adds gradients of one dtype and device with the kernel, and removes them from the lists. Returns whether there
// were any.
bool add_some_by_kernel(std::vector<at::Tensor>& sums, std::vector<at::Tensor>& gradients) {
  const auto like = gradients.front();
  AddHalvesArguments arguments{};
  int tensors = 0;
  std::vector<at::Tensor> other_sums, other_gradients;
  for (size_t i = 0; i < sums.size(); ++i) {
    const auto& gradient = gradients[i];
    const bool alike = gradient.device() == like.device() &&
                       gradient.scalar_type() == like.scalar_type() &&
                       is_alike_in_memory(sums[i], gradient);
    if (tensors < ADDED_AT_ONCE && alike) {
      arguments.from[tensors] = gradient.const_data_ptr();
      arguments.into[tensors] = sums[i].mutable_data_ptr<float>();
      arguments.count[tensors++] = gradient.numel();
    } else {
      other_sums.push_back(sums[i]);
      other_gradients.push_back(gradient);
    }
  }
  if (tensors == 0) return false;
  const c10::DeviceGuard there(like.device());
  const auto kind = brimful::kernels::number_kind(like);
  brimful::kernels::functions()->add_halves(arguments, kind, tensors);
  sums.swap(other_sums);
  gradients.swap(other_gradients);
  return true;
}

// Adds half-precision gradients to their f32 sums: in one pass with the custom kernel, and the remaining ones in
// pieces of bounded size. libtorch's foreach operations take one dtype, so each piece is converted first.
void add_half(
    std::vector<at::Tensor> sums, std::vector<at::Tensor> gradients, int64_t piece_bytes) {
  const auto by_kernel = [&] {
    while (!sums.empty() && brimful::kernels::takes(gradients.front())) {
      if (!add_some_by_kernel(sums, gradients)) break;
    }
  };
  brimful::kernels::or_else("sums of gradients", by_kernel, [] {});
  for (size_t start = 0, end = 0; start < sums.size(); start = end) {
    std::vector<at::Tensor> into, converted, from;
    for (int64_t bytes = 0; end < sums.size() && (end == start || bytes < piece_bytes); ++end) {
      bytes += static_cast<int64_t>(sums[end].nbytes());
      into.push_back(sums[end]);
      from.push_back(gradients[end]);
      converted.push_back(empty_sum(gradients[end]));
    }
    at::_foreach_copy_(converted, from);
    at::_foreach_add_(into, converted);
  }
}

}  // namespace

extern "C" {

// Returns the index of the first parameter whose gradient is not strided (dense), or `count`.
size_t brimful_first_sparse_gradient(at::Tensor* const* parameters, size_t count) noexcept {
  size_t at = 0;
  for (; at < count; ++at) {
    const at::Tensor& gradient = parameters[at]->mutable_grad();
    if (gradient.defined() && gradient.layout() != at::kStrided) break;
  }
  return at;
}

// Copies gradients that share memory, as a plain backward may leave them.
int32_t brimful_own_gradients(
    const at::Tensor* const* parameters, size_t count, char** message) noexcept {
  return guarded(message, [&] {
    const at::NoGradGuard no_grad;
    brimful::OwnedGradients owned;
    std::unordered_set<const at::TensorImpl*> seen;
    for (size_t i = 0; i < count; ++i) {
      if (seen.insert(parameters[i]->unsafeGetTensorImpl()).second) owned.make_in(*parameters[i]);
    }
  });
}

// Transfers each parameter's gradient into its sum: adds it, or makes it the sum if there is none yet. The parameter
// is left without a gradient.
int32_t brimful_collect_gradients(
    at::Tensor* const* parameters, at::Tensor** sums, size_t count, int64_t piece_bytes,
    char** message) noexcept {
  return guarded(message, [&] {
    const at::NoGradGuard no_grad;
    std::vector<at::Tensor> into, added, half_into, half_added, first_into, first_from;
    for (size_t i = 0; i < count; ++i) {
      at::Tensor& place = parameters[i]->mutable_grad();
      if (!place.defined()) continue;
      at::Tensor gradient = std::move(place);
      place = at::Tensor();
      if (sums[i] == nullptr && is_half(gradient.scalar_type())) {
        sums[i] = new at::Tensor(empty_sum(gradient));
        first_into.push_back(*sums[i]);
        first_from.push_back(gradient);
      } else if (sums[i] == nullptr) {
        sums[i] = new at::Tensor(std::move(gradient));
      } else if (is_half(gradient.scalar_type())) {
        half_into.push_back(*sums[i]);
        half_added.push_back(gradient);
      } else {
        into.push_back(*sums[i]);
        added.push_back(gradient);
      }
    }
    if (!first_into.empty()) at::_foreach_copy_(first_into, first_from);
    if (!into.empty()) at::_foreach_add_(into, added);
    add_half(std::move(half_into), std::move(half_added), piece_bytes);
  });
}

}  // extern "C"
