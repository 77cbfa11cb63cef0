// Switch for custom kernels, reasons for fallbacks, and access to their compiler.

#include "kernels.h"

#include "../cuda/kernels/compiler.h"
#include "guard.h"
#include "kernel_sources.h"

#include <strings.h>

#include <atomic>
#include <cstdlib>
#include <mutex>
#include <set>
#include <sstream>

using brimful::guarded;
namespace kernels = brimful::kernels;

namespace {

std::atomic<const BrimfulCudaFunctions*> table{nullptr};

struct Refusals {
  std::mutex mutex;
  std::set<std::string> known;
  std::string unsaid;
  std::atomic<bool> news{false};
};

Refusals& refusals() {
  static Refusals all;
  return all;
}

// Returns whether BRIMFUL_KERNELS leaves the kernels on. An unknown word switches them off: a variable that is set
// asks for something other than the default.
bool asked_for() {
  const char* asked = std::getenv("BRIMFUL_KERNELS");
  if (asked == nullptr) return true;
  const auto is = [&](const char* word) { return strcasecmp(asked, word) == 0; };
  for (const char* on : {"", "on", "1", "true", "yes"}) {
    if (is(on)) return true;
  }
  for (const char* off : {"off", "0", "false", "no"}) {
    if (is(off)) return false;
  }
  kernels::refused(c10::str("BRIMFUL_KERNELS is \"", asked, "\": set it to on or off, or unset it"));
  return false;
}

std::atomic<bool>& is_on() {
  static std::atomic<bool> on{asked_for()};
  return on;
}

const kernels::Source& source_named(const std::string& name) {
  for (const auto& source : kernels::kSources) {
    if (name == source.name) return source;
  }
  TORCH_CHECK(false, "there is no kernel source ", name);
}

std::vector<std::string> words(const char* text) {
  std::istringstream in(text);
  std::vector<std::string> all;
  for (std::string word; in >> word;) all.push_back(word);
  return all;
}

}  // namespace

namespace brimful::kernels {

void found(const BrimfulCudaFunctions* functions) noexcept { table = functions; }

const BrimfulCudaFunctions* functions() noexcept { return table; }

const BrimfulCudaFunctions& loaded() {
  TORCH_CHECK(functions() != nullptr, "libtorch's CUDA half is not loaded");
  return *functions();
}

const BrimfulCudaFunctions* functions_for(const at::Tensor& tensor) noexcept {
  return tensor.is_cuda() && is_on() ? table.load() : nullptr;
}

void refused(const std::string& why) noexcept {
  try {
    Refusals& all = refusals();
    const std::lock_guard<std::mutex> alone(all.mutex);
    if (!all.known.insert(why).second) return;
    if (!all.unsaid.empty()) all.unsaid += '\n';
    all.unsaid += why;
    all.news = true;
  } catch (const std::exception&) {
    // Without memory the reason is lost; the work goes on.
  }
}

}  // namespace brimful::kernels

extern "C" {

bool brimful_kernels_enabled() noexcept { return is_on(); }

void brimful_kernels_enable(bool on) noexcept { is_on() = on; }

// Returns the refusals since the last call, one a line; null if there are none.
char* brimful_kernels_refusals() noexcept {
  Refusals& all = refusals();
  if (!all.news.exchange(false)) return nullptr;
  const std::lock_guard<std::mutex> alone(all.mutex);
  char* text = strdup(all.unsaid.c_str());
  all.unsaid.clear();
  return text;
}

int32_t brimful_kernels_describe(int32_t device, char** out, char** message) noexcept {
  return guarded(message, [&] {
    *out = strdup(kernels::loaded().describe(device).c_str());
  });
}

int32_t brimful_kernels_pretend(
    int32_t multiprocessors, uint64_t shared_bytes, char** message) noexcept {
  return guarded(message, [&] { kernels::loaded().pretend(multiprocessors, shared_bytes); });
}

int32_t brimful_kernels_pretend_failure(
    int64_t launches, int64_t* left, char** message) noexcept {
  return guarded(message, [&] { *left = kernels::loaded().pretend_failure(launches); });
}

int32_t brimful_kernels_fail_loads(
    int32_t after, int32_t count, int32_t error, char** message) noexcept {
  return guarded(message, [&] { kernels::loaded().fail_loads(after, count, error); });
}

// Compiles a source, given by its file name, with these defines.
int32_t brimful_kernels_compile(
    const char* source, const char* defines, int32_t architecture, bool* from_cache, size_t* bytes,
    char** message) noexcept {
  return guarded(message, [&] {
    const auto cubin = kernels::compiled(source_named(source), words(defines), architecture);
    *from_cache = cubin.from_cache;
    *bytes = cubin.bytes.size();
  });
}

// Compiles a source on a background thread, for the next caller that needs it.
int32_t brimful_kernels_compile_ahead(
    const char* source, const char* defines, int32_t architecture, char** message) noexcept {
  return guarded(message, [&] {
    kernels::compile_ahead({{source_named(source), words(defines)}}, architecture);
  });
}

}  // extern "C"
