// Registry of the sums that autograd nodes may add to during a step's backward, and of partial sums deferred to
// its end.

#include "offered_sums.h"

#include "guard.h"
#include "kernel_tensors.h"
#include "tensors.h"

#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <unordered_map>
#include <utility>
#include <vector>

namespace {

struct OfferedSum {
  at::Tensor sum;
  c10::Device device;
  // Row blocks × columns each.
  std::vector<at::Tensor> partials = {};
  // Stream that used the sum or the partials last. All streams are ordered after the work queued when the
  // backward began.
  std::optional<c10::Stream> last = {};

  // Makes the current stream wait for the last one. Nodes run on the stream of their forward, and libtorch adds
  // no wait for a node that returns no gradient.
  void come_here() {
    const auto here = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
    const auto before = std::exchange(last, here);
    if (!before || *before == here) return;
    c10::Event done(device.type());
    done.record(*before);
    done.block(here);
    // The tensors may belong to another stream, where their memory could otherwise be reused before this stream is
    // done.
    if (sum.defined()) sum.record_stream(here);
    for (const auto& each : partials) each.record_stream(here);
  }
};

// Offers of all threads: a device's backward runs on a thread of libtorch's.
struct Offers {
  std::shared_mutex mutex;
  // Entries keep their addresses while others are added and removed.
  std::unordered_map<const at::TensorImpl*, OfferedSum> sums;
};

Offers& offers() {
  static Offers all;
  return all;
}

OfferedSum* offered(const at::Tensor& parameter) {
  Offers& all = offers();
  const std::shared_lock<std::shared_mutex> with_others(all.mutex);
  const auto found = all.sums.find(parameter.unsafeGetTensorImpl());
  return found == all.sums.end() ? nullptr : &found->second;
}

// Sums, each with a table of partial sums to add; all on one device, at most one table for each sum.
using Tables = std::vector<std::pair<at::Tensor*, at::Tensor>>;

void add_by_kernel(const Tables& tables, size_t from, size_t count) {
  AddColumnSumsArguments arguments{};
  std::vector<at::Tensor> sums;
  for (size_t i = 0; i < count; ++i) {
    const auto& [sum, partials] = tables[from + i];
    arguments.adds[i] = sum->defined();
    sums.push_back(sum->defined() ? *sum : at::empty({partials.size(1)}, partials.options()));
    arguments.from[i] = partials.const_data_ptr<float>();
    arguments.into[i] = sums[i].mutable_data_ptr<float>();
    arguments.rows[i] = static_cast<int>(partials.size(0));
    arguments.columns[i] = static_cast<int>(partials.size(1));
  }
  brimful::kernels::functions()->add_column_sums(arguments, static_cast<int>(count));
  // Assigned last, so that a failure leaves no empty sum behind.
  for (size_t i = 0; i < count; ++i) *tables[from + i].first = std::move(sums[i]);
}

void add_by_libtorch(const Tables& tables, size_t from, size_t count) {
  for (size_t i = from; i < from + count; ++i) {
    auto& [sum, partials] = tables[i];
    *sum = sum->defined() ? sum->add_(partials.sum(0)) : partials.sum(0);
  }
}

void add_up(const Tables& tables) {
  const c10::DeviceGuard there(tables.front().second.device());
  for (size_t from = 0; from < tables.size(); from += TABLES_AT_ONCE) {
    const auto count = std::min<size_t>(tables.size() - from, TABLES_AT_ONCE);
    brimful::kernels::or_else(
        "sums of columns", [&] { add_by_kernel(tables, from, count); },
        [&] { add_by_libtorch(tables, from, count); });
  }
}

// Takes the next table of each parameter on the first one's device; empty when none are left.
Tables next_tables(const at::Tensor* const* parameters, size_t count) {
  Tables tables;
  for (size_t i = 0; i < count; ++i) {
    auto* offer = offered(*parameters[i]);
    if (offer == nullptr || offer->partials.empty()) continue;
    const auto device = offer->partials.back().device();
    if (!tables.empty() && tables.front().second.device() != device) continue;
    offer->come_here();
    tables.emplace_back(&offer->sum, std::move(offer->partials.back()));
    offer->partials.pop_back();
  }
  return tables;
}

}  // namespace

namespace brimful {

at::Tensor* offered_sum(const at::Tensor& parameter) {
  auto* offer = offered(parameter);
  if (offer == nullptr) return nullptr;
  offer->come_here();
  return &offer->sum;
}

bool takes_partials(const at::Tensor& parameter) {
  return offered(parameter) != nullptr && sum_kind(parameter.scalar_type()) == at::kFloat;
}

void leave_partials(const at::Tensor& parameter, const at::Tensor& partials) {
  auto* offer = offered(parameter);
  // The offer was withdrawn, because the backward failed on another device's thread.
  if (offer == nullptr) return;
  offer->come_here();
  offer->partials.push_back(partials);
}

}  // namespace brimful

extern "C" {

// Offers these sums to custom nodes, for parameters on a GPU only. A sum that does not exist yet is null.
int32_t brimful_offer_sums(
    const at::Tensor* const* parameters, at::Tensor* const* sums, size_t count,
    char** message) noexcept {
  return brimful::guarded(message, [&] {
    Offers& all = offers();
    const std::unique_lock<std::shared_mutex> alone(all.mutex);
    for (size_t i = 0; i < count; ++i) {
      if (brimful::kernels::functions_for(*parameters[i]) == nullptr) continue;
      // A parameter listed twice uses its first sum, as in brimful_collect_gradients.
      all.sums.try_emplace(
          parameters[i]->unsafeGetTensorImpl(),
          OfferedSum{brimful::or_none(sums[i]), parameters[i]->device()});
    }
  });
}

// Adds up the deferred partial sums after the backward.
int32_t brimful_settle_sums(
    const at::Tensor* const* parameters, size_t count, char** message) noexcept {
  return brimful::guarded(message, [&] {
    const at::NoGradGuard no_grad;
    for (auto tables = next_tables(parameters, count); !tables.empty();
         tables = next_tables(parameters, count)) {
      add_up(tables);
    }
  });
}

// Withdraws the offers and returns the sums created meanwhile, also after a failed backward. The current stream
// is ordered after all additions.
void brimful_withdraw_sums(
    const at::Tensor* const* parameters, at::Tensor** sums, size_t count) noexcept {
  Offers& all = offers();
  const std::unique_lock<std::shared_mutex> alone(all.mutex);
  for (size_t i = 0; i < count; ++i) {
    const auto found = all.sums.find(parameters[i]->unsafeGetTensorImpl());
    if (found == all.sums.end()) continue;
    try {
      found->second.come_here();
    } catch (const std::exception&) {
      // The device has failed, which the next call on it reports.
    }
    auto& sum = found->second.sum;
    if (sums[i] == nullptr && sum.defined()) sums[i] = new at::Tensor(std::move(sum));
    all.sums.erase(found);
  }
}

}  // extern "C"
