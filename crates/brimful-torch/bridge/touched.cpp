// Records the operations of a thread with their host-side numbers, and the memory that they read and write as far
// as it outlives them.
//
// libtorch calls back before each operation of a thread that has registered, as for its profilers. An operation's
// schema marks its outputs, except running statistics.

#include "touched.h"

#include "draws.h"
#include "guard.h"
#include "version.h"

#include <ATen/Functions.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/function_schema.h>
#include <ATen/record_function.h>
#include <c10/core/StorageImpl.h>

#include <algorithm>
#include <memory>
#include <sstream>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

using brimful::is_elsewhere;
using brimful::takes_generator;

namespace {

struct Touch {
  // A weak pointer: storage that is gone at the end was internal to the work.
  c10::weak_intrusive_ptr<c10::StorageImpl> storage;
  bool written;
};

using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

// Tensors that the work used while they did not require a gradient.
struct Frozen {
  std::vector<WeakTensor> tensors;
};

struct Touches {
  // By address, which is not reused while a weak pointer holds it.
  std::unordered_map<c10::StorageImpl*, Touch> all;
  // By address, likewise.
  std::unordered_map<c10::TensorImpl*, WeakTensor> frozen;
  // Operations with their numbers, as text.
  std::vector<std::string> lines;
  bool draws_on_host = false;
  at::CallbackHandle callback = at::INVALID_CALLBACK_HANDLE;
  Touches* around = nullptr;

  void add(const at::Tensor& tensor, bool written) {
    if (!tensor.defined() || !tensor.has_storage()) return;
    const auto kind = tensor.scalar_type();
    const bool may_train = at::isFloatingType(kind) || at::isComplexType(kind);
    if (may_train && !tensor.requires_grad()) {
      frozen.try_emplace(tensor.unsafeGetTensorImpl(), tensor.getIntrusivePtr());
    }
    const auto& storage = tensor.storage();
    auto* impl = storage.unsafeGetStorageImpl();
    // Creates a weak pointer only for new storage.
    if (const auto known = all.find(impl); known != all.end()) {
      known->second.written |= written;
    } else {
      all.emplace(impl, Touch{storage.getWeakStorageImpl(), written});
    }
  }
};

thread_local Touches* recording = nullptr;

BRIMFUL_READ_AGAIN(
    "which operations write to what their schemas do not mark: batch normalisation its running "
    "statistics, and no other");

// Returns whether this is a running statistic, which batch normalisation's schema does not mark as written.
bool is_running(const c10::Argument& argument) {
  return argument.name() == "running_mean" || argument.name() == "running_var";
}

void touch(Touches& touches, const c10::IValue& value, bool written) {
  if (value.isTensor()) {
    touches.add(value.toTensor(), written);
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorVector()) touches.add(tensor, written);
  } else if (value.isList()) {
    for (const c10::IValue& item : value.toListRef()) touch(touches, item, written);
  }
}

// Returns whether this is a number on the host: a 0-dim CPU tensor.
bool is_host_number(const at::Tensor& tensor) {
  return tensor.defined() && tensor.is_cpu() && tensor.dim() == 0;
}

// Returns whether this is no tensor, or a 0-dim CPU tensor. An operation that has only such arguments may be about
// to write them, so their values mean nothing yet.
bool is_number_alone(const c10::IValue& value) {
  return !value.isTensor() || !value.toTensor().defined() || is_host_number(value.toTensor());
}

// Appends the host-side numbers of an argument.
void say(std::ostream& line, const c10::IValue& value) {
  if (value.isScalar() || value.isBool() || value.isString()) {
    line << ' ' << value;
  } else if (value.isTensor()) {
    const auto& tensor = value.toTensor();
    if (is_host_number(tensor)) line << ' ' << tensor.item();
  } else if (value.isList()) {
    for (const c10::IValue& item : value.toListRef()) say(line, item);
  }
}

std::unique_ptr<at::ObserverContext> before(const at::RecordFunction& function) {
  const auto schema = function.operator_schema();
  // Autograd's own threads may inherit the callback, but no list.
  if (recording == nullptr || !schema) return nullptr;
  // Reading a value is itself an operation, which must not be recorded.
  const at::DisableRecordFunctionGuard unseen;
  std::ostringstream line;
  line.precision(17);
  line << function.name();
  const auto& arguments = schema->arguments();
  const auto inputs = function.inputs();
  const bool on_numbers = std::all_of(inputs.begin(), inputs.end(), is_number_alone);
  for (size_t i = 0; i < inputs.size() && i < arguments.size(); ++i) {
    const auto* alias = arguments[i].alias_info();
    const bool written = (alias != nullptr && alias->isWrite()) || is_running(arguments[i]);
    touch(*recording, inputs[i], written);
    if (!(on_numbers && inputs[i].isTensor())) say(line, inputs[i]);
  }
  recording->lines.push_back(line.str());
  recording->draws_on_host |= std::any_of(arguments.begin(), arguments.end(), takes_generator) &&
                              std::none_of(inputs.begin(), inputs.end(), is_elsewhere);
  return nullptr;
}

// Returns a whole storage as a byte tensor.
at::Tensor bytes_of(c10::intrusive_ptr<c10::StorageImpl> impl) {
  const auto size = static_cast<int64_t>(impl->nbytes());
  const auto options = at::TensorOptions(at::kByte).device(impl->device());
  auto bytes = at::empty({0}, options);
  bytes.set_(c10::Storage(std::move(impl)), 0, {size}, {1});
  return bytes;
}

}  // namespace

void brimful::report(
    const char* name, std::initializer_list<double> numbers,
    std::initializer_list<const at::Tensor*> read,
    std::initializer_list<const at::Tensor*> written) {
  if (recording == nullptr) return;
  std::ostringstream line;
  line.precision(17);
  line << name;
  for (const double number : numbers) line << ' ' << number;
  recording->lines.push_back(line.str());
  for (const auto* tensor : read) recording->add(*tensor, false);
  for (const auto* tensor : written) recording->add(*tensor, true);
}

extern "C" {

// Records this thread's operations until `touches` is ended.
int32_t brimful_touches_begin(Touches** touches, char** message) noexcept {
  return brimful::guarded(message, [&] {
    auto inner = std::make_unique<Touches>();
    inner->callback = at::addThreadLocalCallback(
        at::RecordFunctionCallback(&before).needsInputs(true).scopes({at::RecordScope::FUNCTION}));
    inner->around = recording;
    recording = inner.release();
    *touches = recording;
  });
}

// Replaces the thread's recording and returns the previous one; null pauses it.
Touches* brimful_touches_exchange(Touches* touches) noexcept {
  return std::exchange(recording, touches);
}

// Calls `ran` for each operation, and `found` for each storage that still exists, as a byte tensor that the
// caller owns. Returns the frozen tensors that still exist, and whether an operation drew random numbers on the
// host.
int32_t brimful_touches_end(
    Touches* touches, void (*ran)(void* context, const char* line),
    void (*found)(void* context, at::Tensor* bytes, bool written), void* context, Frozen** frozen,
    bool* draws_on_host, char** message) noexcept {
  const std::unique_ptr<Touches> own(touches);
  at::removeCallback(own->callback);
  recording = own->around;
  *draws_on_host = own->draws_on_host;
  return brimful::guarded(message, [&] {
    for (const auto& line : own->lines) ran(context, line.c_str());
    for (auto& [_, touch] : own->all) {
      auto storage = touch.storage.lock();
      if (!storage || storage->nbytes() == 0) continue;
      found(context, new at::Tensor(bytes_of(std::move(storage))), touch.written);
    }
    auto left = std::make_unique<Frozen>();
    for (auto& [_, tensor] : own->frozen) {
      if (!tensor.expired()) left->tensors.push_back(std::move(tensor));
    }
    *frozen = left.release();
  });
}

// Returns whether one of these tensors requires a gradient by now.
bool brimful_any_is_thawed(const Frozen* frozen) noexcept {
  const auto is_thawed = [](const WeakTensor& tensor) {
    const auto found = tensor.lock();
    return found && found->requires_grad();
  };
  return std::any_of(frozen->tensors.begin(), frozen->tensors.end(), is_thawed);
}

void brimful_forget_frozen(Frozen* frozen) noexcept { delete frozen; }

// Returns whether the memory of one of these tensors has no user but the caller.
bool brimful_any_is_left(const at::Tensor* const* tensors, size_t count) noexcept {
  const auto is_left = [](const at::Tensor* tensor) { return tensor->storage().use_count() == 1; };
  return std::any_of(tensors, tensors + count, is_left);
}

}  // extern "C"
