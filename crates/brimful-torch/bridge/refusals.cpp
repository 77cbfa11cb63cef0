// What arenas have refused lately, to be found again by the sentence that each refusal was thrown with.
//
// Most refusals are thrown through tch, which hands on an exception's text and nothing else. Whoever
// has that text gets the numbers here, whatever was said around it and on whatever thread. Refusals
// with the same sentence have the same numbers, so it does not matter which of them is found.

#include "refusals.h"

#include <array>
#include <cstring>
#include <deque>
#include <mutex>

namespace {

// More than can be under way at once: a thread reads its text before it allocates again.
constexpr size_t kKept = 256;

struct Recent {
  std::mutex turn;
  std::deque<brimful::Refusal> list;
};

// Never destroyed: tensors in statics may be allocated after every destructor.
Recent& recent() {
  static auto* the_one = new Recent;
  return *the_one;
}

}  // namespace

void brimful::note_refusal(Refusal refusal) {
  auto& [turn, list] = recent();
  const std::lock_guard<std::mutex> alone(turn);
  list.push_back(std::move(refusal));
  if (list.size() > kKept) list.pop_front();
}

extern "C" {

// Of the refusal whose sentence is in the text, if it was one of the last: the arena's name, which is the receiver's to
// free, and the bytes asked for, in use and allowed, of which -1 is no limit. Else null.
char* brimful_arena_refusal(const char* text, std::array<int64_t, 3>* numbers) noexcept {
  auto& [turn, list] = recent();
  const std::lock_guard<std::mutex> alone(turn);
  const brimful::Refusal* found = nullptr;
  for (const auto& refusal : list) {
    // "limit 10" is in "limit 100" too: the longest is meant.
    const bool longer = found == nullptr || refusal.sentence.size() > found->sentence.size();
    if (longer && strstr(text, refusal.sentence.c_str()) != nullptr) found = &refusal;
  }
  if (found == nullptr) return nullptr;
  *numbers = {found->asked, found->in_use, found->limit};
  return strdup(found->arena.c_str());
}

}  // extern "C"
