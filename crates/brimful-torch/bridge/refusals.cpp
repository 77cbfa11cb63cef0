// Recent refusals of arenas, found by the sentence that each was thrown with.
//
// Most refusals are thrown through tch, which passes on only an exception's text. A caller with that text gets the
// numbers here, whatever surrounds the sentence and on whatever thread. Refusals with the same sentence have the
// same numbers, so it does not matter which one is found.

#include "refusals.h"

#include <array>
#include <cstring>
#include <deque>
#include <mutex>

namespace {

// More than can be pending at once: a thread reads its error before it allocates again.
constexpr size_t kKept = 256;

struct Recent {
  std::mutex mutex;
  std::deque<brimful::Refusal> list;
};

// Never destroyed: tensors in statics may be allocated after every destructor.
Recent& recent() {
  static auto* the_one = new Recent;
  return *the_one;
}

}  // namespace

void brimful::note_refusal(Refusal refusal) {
  auto& [mutex, list] = recent();
  const std::lock_guard<std::mutex> alone(mutex);
  list.push_back(std::move(refusal));
  if (list.size() > kKept) list.pop_front();
}

extern "C" {

// Finds the recent refusal whose sentence is in the text. Returns the arena's name, which the caller frees, and
// sets the bytes asked for, in use and allowed (-1: no limit). Returns null if there is none.
char* brimful_arena_refusal(const char* text, std::array<int64_t, 3>* numbers) noexcept {
  auto& [mutex, list] = recent();
  const std::lock_guard<std::mutex> alone(mutex);
  const brimful::Refusal* found = nullptr;
  for (const auto& refusal : list) {
    // "limit 10" is also in "limit 100": the longest match is right.
    const bool longer = found == nullptr || refusal.sentence.size() > found->sentence.size();
    if (longer && strstr(text, refusal.sentence.c_str()) != nullptr) found = &refusal;
  }
  if (found == nullptr) return nullptr;
  *numbers = {found->asked, found->in_use, found->limit};
  return strdup(found->arena.c_str());
}

}  // extern "C"
