// Makes new tensors meta tensors (shapes without memory), on threads that ask for it.
//
// A thread that includes the dispatch key below passes through `onto_meta` whenever a tensor is allocated on a
// named device, and the device is replaced by libtorch's "meta" one. The key exists for such interceptions; other
// threads do not pass here.

#include "version.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

BRIMFUL_READ_AGAIN(
    "that nothing else uses the key TESTING_ONLY_GenericWrapper, and that all ways to make a tensor "
    "come down to empty.memory_format and empty_strided");

namespace {

constexpr auto kKey = c10::DispatchKey::TESTING_ONLY_GenericWrapper;

void onto_meta(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& arguments = op.schema().arguments();
  const auto first = stack->size() - arguments.size();
  for (size_t i = 0; i < arguments.size(); ++i) {
    auto& value = (*stack)[first + i];
    // A tensor created without a named device is about to be filled from host memory.
    if (arguments[i].name() == "device" && value.isDevice()) {
      value = c10::Device(c10::kMeta);
    }
  }
  const c10::impl::ExcludeDispatchKeyGuard once(kKey);
  op.callBoxed(stack);
}

}  // namespace

TORCH_LIBRARY_IMPL(_, TESTING_ONLY_GenericWrapper, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

// All other factory functions (zeros, ones, randn and so on) call these two.
TORCH_LIBRARY_IMPL(aten, TESTING_ONLY_GenericWrapper, m) {
  m.impl("empty.memory_format", torch::CppFunction::makeFromBoxedFunction<&onto_meta>());
  m.impl("empty_strided", torch::CppFunction::makeFromBoxedFunction<&onto_meta>());
}

extern "C" {

// Switches this thread's state and returns the previous one.
bool brimful_meta_enter(bool on) noexcept {
  const bool last = c10::impl::tls_is_dispatch_key_included(kKey);
  c10::impl::tls_set_dispatch_key_included(kKey, on);
  return last;
}

}  // extern "C"
