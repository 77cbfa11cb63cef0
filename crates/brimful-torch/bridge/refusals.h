// Recent refusals of arenas, found by the sentence that each was thrown with.
#pragma once

#include <cstdint>
#include <string>

namespace brimful {

// Allocation that an arena has refused; a limit of -1 means none.
struct Refusal {
  std::string sentence;
  std::string arena;
  int64_t asked, in_use, limit;
};

void note_refusal(Refusal refusal);

}  // namespace brimful
