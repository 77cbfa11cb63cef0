// What arenas have refused lately, to be found again by the sentence that each refusal was thrown with.
#pragma once

#include <cstdint>
#include <string>

namespace brimful {

// An allocation that an arena has refused; -1 stands for no limit.
struct Refusal {
  std::string sentence;
  std::string arena;
  int64_t asked, in_use, limit;
};

void note_refusal(Refusal refusal);

}  // namespace brimful
