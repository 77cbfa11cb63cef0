// Memory format of a tensor: contiguous or channels last.

#include "guard.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>

namespace {

// The format depends on the dimensions: images have four, volumes five.
at::MemoryFormat format_of(const at::Tensor& tensor, bool channels_last) {
  TORCH_CHECK(
      tensor.dim() == 4 || tensor.dim() == 5, "a tensor of shape ", tensor.sizes(),
      " has no channels to put last: it needs four or five dimensions");
  if (!channels_last) return at::MemoryFormat::Contiguous;
  return tensor.dim() == 4 ? at::MemoryFormat::ChannelsLast : at::MemoryFormat::ChannelsLast3d;
}

}  // namespace

extern "C" {

// Returns the tensor in this memory format: itself, or a copy if its format differs.
int32_t brimful_to_memory_format(
    const at::Tensor* tensor, bool channels_last, at::Tensor** out, char** message) noexcept {
  return brimful::guarded(message, [&] {
    *out = new at::Tensor(tensor->contiguous(format_of(*tensor, channels_last)));
  });
}

// Changes the memory format in place, for all handles of the tensor and for its gradient.
int32_t brimful_set_memory_format(at::Tensor* tensor, bool channels_last, char** message) noexcept {
  return brimful::guarded(message, [&] {
    const at::NoGradGuard no_grad;
    const auto format = format_of(*tensor, channels_last);
    const auto gradient = tensor->grad().defined() ? tensor->grad().contiguous(format) : at::Tensor();
    // Everything that may run out of memory precedes the first change.
    const auto data = tensor->detach().contiguous(format);
    tensor->mutable_grad() = at::Tensor();
    tensor->set_data(data);
    tensor->mutable_grad() = gradient;
  });
}

}  // extern "C"
