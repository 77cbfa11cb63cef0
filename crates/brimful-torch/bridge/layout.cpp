// The order of a tensor's numbers in memory: as its dimensions are, or with the channels last.

#include "guard.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>

namespace {

// Which order that is depends on the dimensions: images have four, volumes five.
at::MemoryFormat format_of(const at::Tensor& tensor, bool channels_last) {
  TORCH_CHECK(
      tensor.dim() == 4 || tensor.dim() == 5, "a tensor of shape ", tensor.sizes(),
      " has no channels to put last: it needs four or five dimensions");
  if (!channels_last) return at::MemoryFormat::Contiguous;
  return tensor.dim() == 4 ? at::MemoryFormat::ChannelsLast : at::MemoryFormat::ChannelsLast3d;
}

}  // namespace

extern "C" {

// The same tensor, or a copy of it where its numbers are in another order.
int32_t brimful_laid_out(
    const at::Tensor* tensor, bool channels_last, at::Tensor** out, char** message) noexcept {
  return brimful::guarded(message, [&] {
    *out = new at::Tensor(tensor->contiguous(format_of(*tensor, channels_last)));
  });
}

// Changes the order in place, for all that share the tensor, and of its gradient as well.
int32_t brimful_lay_out(at::Tensor* tensor, bool channels_last, char** message) noexcept {
  return brimful::guarded(message, [&] {
    const at::NoGradGuard no_grad;
    const auto format = format_of(*tensor, channels_last);
    const auto gradient = tensor->grad().defined() ? tensor->grad().contiguous(format) : at::Tensor();
    // All that may run out of memory comes before the first change.
    const auto data = tensor->detach().contiguous(format);
    tensor->mutable_grad() = at::Tensor();
    tensor->set_data(data);
    tensor->mutable_grad() = gradient;
  });
}

}  // extern "C"
