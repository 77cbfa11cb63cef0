// Thread-local random numbers, for threads that ask for them.
//
// libtorch has one generator for all CPU threads. A thread that includes the dispatch key below passes through
// `draw_own` at every operation that takes a generator; it fills a missing generator argument with the thread's
// own. Everything else that draws (dropout, rand, attention) calls these operations. The key exists for such
// interceptions: other operations, and other threads, do not pass here.

#include "draws.h"
#include "guard.h"
#include "version.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <algorithm>
#include <memory>

using brimful::is_elsewhere;
using brimful::takes_generator;

BRIMFUL_READ_AGAIN(
    "that nothing else uses the key TESTING_ONLY_GenericMode, that it comes before autograd, and that "
    "all that draws comes down to operations of aten that take an optional generator");

namespace {

constexpr auto kKey = c10::DispatchKey::TESTING_ONLY_GenericMode;

// A thread's generators form a stack: the innermost draws, and owns the outer ones.
struct Own {
  at::Generator generator = at::detail::createCPUGenerator();
  uint64_t seed = 0;
  // Filling a generator's state takes a thousand times longer than storing the seed, and most seeded generators
  // never draw.
  bool stale = true;
  std::unique_ptr<Own> around;

  const at::Generator& seeded() {
    if (stale) {
      generator.set_current_seed(seed);
      stale = false;
    }
    return generator;
  }
};

thread_local std::unique_ptr<Own> innermost;

void draw_own(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const auto& arguments = op.schema().arguments();
  const auto given = stack->end() - static_cast<std::ptrdiff_t>(arguments.size());
  // Autograd's own threads inherit the key, but no generator.
  if (innermost && std::none_of(given, stack->end(), is_elsewhere)) {
    for (size_t i = 0; i < arguments.size(); ++i) {
      if (given[i].isNone() && takes_generator(arguments[i])) given[i] = innermost->seeded();
    }
  }
  const auto below = c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kKey);
  op.redispatchBoxed(keys & below, stack);
}

}  // namespace

TORCH_LIBRARY_IMPL(_, TESTING_ONLY_GenericMode, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

// Runs before main, after libtorch has registered its operations and before any of them runs.
TORCH_LIBRARY_IMPL(aten, TESTING_ONLY_GenericMode, m) {
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    const auto op = dispatcher.findSchema(name);
    if (!op || name.getNamespace() != "aten") continue;
    const auto& arguments = op->schema().arguments();
    if (std::any_of(arguments.begin(), arguments.end(), takes_generator)) {
      m.impl(c10::toString(name).c_str(), torch::CppFunction::makeFromBoxedFunction<&draw_own>());
    }
  }
}

extern "C" {

// Creates a generator that this thread draws from until `own` leaves.
int32_t brimful_own_generator_enter(Own** own, char** message) noexcept {
  return brimful::guarded(message, [&] {
    auto inner = std::make_unique<Own>();
    *own = inner.get();
    inner->around = std::move(innermost);
    innermost = std::move(inner);
    c10::impl::tls_set_dispatch_key_included(kKey, true);
  });
}

void brimful_own_generator_seed(Own* own, uint64_t seed) noexcept {
  own->seed = seed;
  own->stale = true;
}

// Guards may be dropped in any order, so `own` need not be the innermost.
void brimful_own_generator_leave(Own* own) noexcept {
  auto* link = &innermost;
  while (link->get() != own) link = &(*link)->around;
  *link = std::move((*link)->around);
  c10::impl::tls_set_dispatch_key_included(kKey, innermost != nullptr);
}

}  // extern "C"
