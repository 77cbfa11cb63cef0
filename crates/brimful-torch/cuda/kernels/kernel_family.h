// Kernels of one source, indexed by their compile-time numbers, so that a launch finds its kernel without
// building a string.
#pragma once

#include "compiler.h"
#include "kernel.h"

#include <array>
#include <map>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace brimful::kernels {

// Define of a source; `names` maps its numbers to words, if given.
struct Define {
  const char* name;
  const char* const* names = nullptr;
};

template <size_t N>
class KernelFamily {
 public:
  using Numbers = std::array<int, N>;

  KernelFamily(Source source, std::array<Define, N> defines) : source_(source), defines_(defines) {}

  // Returns a kernel; functions with the same numbers share a module.
  const Kernel& of(const char* function, const Numbers& numbers) const {
    const std::lock_guard<std::mutex> alone(turn_);
    const std::pair key(numbers, std::string_view(function));
    const auto found = all_.find(key);
    if (found != all_.end()) return found->second;
    return all_.try_emplace(key, source_, function, words(numbers)).first->second;
  }

  // Returns the source and defines, for compiling ahead.
  Compiling compiling(const Numbers& numbers) const { return {source_, words(numbers)}; }

 private:
  std::vector<std::string> words(const Numbers& numbers) const {
    std::vector<std::string> all;
    for (size_t i = 0; i < N; ++i) {
      const auto& [name, names] = defines_[i];
      const int number = numbers[i];
      all.push_back(
          name + std::string("=") + (names == nullptr ? std::to_string(number) : names[number]));
    }
    return all;
  }

  const Source source_;
  const std::array<Define, N> defines_;
  mutable std::mutex turn_;
  mutable std::map<std::pair<Numbers, std::string_view>, Kernel> all_;
};

}  // namespace brimful::kernels
