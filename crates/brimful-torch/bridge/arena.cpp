// Memory accounting for the CPU: an allocator that charges each block to its thread's current arena.
//
//   block:  | header: arena, size (64 bytes) | data … |
//                                            ^ the pointer that libtorch sees
//
// libtorch asserts that a block's context equals its data pointer, so the size cannot be stored in a separate
// context. The header keeps the 64-byte alignment that vector code expects.

#include "refusals.h"
#include "version.h"

#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/alloc_cpu.h>
#include <c10/util/Exception.h>

#include <atomic>
#include <mutex>
#include <string>

BRIMFUL_READ_AGAIN(
    "alloc_cpu, SetCPUAllocator and its plain global, and that a block's context is its data pointer");

namespace {

constexpr int64_t kNoLimit = -1;

struct Arena {
  explicit Arena(const char* its_name) : name(its_name) {}

  const std::string name;
  std::atomic<int64_t> limit{kNoLimit};
  std::atomic<int64_t> current{0};
  std::atomic<int64_t> peak{0};
  std::atomic<int64_t> allocations{0};
  // Refused allocations, for whatever reason.
  std::atomic<int64_t> refusals{0};
  // Range of allocation numbers that are to fail; the end is exclusive.
  std::atomic<int64_t> doomed_from{0};
  std::atomic<int64_t> doomed_to{0};
  // Held by the owner's handle and by each living block; the last release deletes the arena.
  std::atomic<int64_t> references{1};
};

void release(Arena* arena) {
  if (arena->references.fetch_sub(1, std::memory_order_acq_rel) == 1) delete arena;
}

// Throws an out-of-memory error. The limit is kNoLimit if a test requested the refusal. The sentence must stay one
// line: callers cut the text at the end of the line, where a backtrace would begin. The error has no backtrace,
// because writing one takes a tenth of a second.
[[noreturn]] void refuse(Arena& arena, int64_t asked, int64_t in_use, int64_t limit) {
  arena.refusals.fetch_add(1, std::memory_order_relaxed);
  const auto sentence = c10::str(
      "out of memory in arena '", arena.name, "': asked for ", asked, " bytes, ", in_use,
      " in use, limit ", limit == kNoLimit ? "injected" : std::to_string(limit));
  brimful::note_refusal({sentence, arena.name, asked, in_use, limit});
  throw c10::OutOfMemoryError(sentence, /*backtrace=*/nullptr);
}

// Charges `size` to the arena, or throws and leaves it unchanged. A refused allocation is never visible in
// `current`, so it cannot make another thread's smaller request fail.
void charge(Arena& arena, int64_t size) {
  const int64_t number = arena.allocations.fetch_add(1, std::memory_order_relaxed) + 1;
  int64_t current = arena.current.load(std::memory_order_relaxed);
  if (number < arena.doomed_to.load(std::memory_order_relaxed) &&
      number >= arena.doomed_from.load(std::memory_order_relaxed)) {
    refuse(arena, size, current, kNoLimit);
  }
  const int64_t limit = arena.limit.load(std::memory_order_relaxed);
  do {
    if (limit != kNoLimit && size > limit - current) refuse(arena, size, current, limit);
  } while (!arena.current.compare_exchange_weak(current, current + size, std::memory_order_relaxed));
  const int64_t reached = current + size;
  int64_t peak = arena.peak.load(std::memory_order_relaxed);
  while (peak < reached &&
         !arena.peak.compare_exchange_weak(peak, reached, std::memory_order_relaxed)) {
  }
  arena.references.fetch_add(1, std::memory_order_relaxed);
}

void discharge(Arena* arena, int64_t size) {
  arena->current.fetch_sub(size, std::memory_order_relaxed);
  release(arena);
}

// Period during which a thread has entered an arena; the guard keeps the arena alive. A thread's stays form a
// stack: the innermost is charged.
struct Stay {
  Arena* arena;
  Stay* around;
};

// Trivially initialised, so that reading it needs no initialisation check on the hot path.
thread_local Stay* innermost = nullptr;

struct alignas(64) Header {
  Arena* arena;
  int64_t size;
};
static_assert(sizeof(Header) == 64, "a block's data must stay 64-byte aligned");

void free_block(void* data) {
  if (data == nullptr) return;
  auto* header = static_cast<Header*>(data) - 1;
  if (header->arena != nullptr) discharge(header->arena, header->size);
  c10::free_cpu(header);
}

struct ArenaAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    if (size == 0) return {nullptr, nullptr, &free_block, c10::Device(c10::kCPU)};
    Arena* arena = innermost != nullptr ? innermost->arena : nullptr;
    const auto bytes = static_cast<int64_t>(size);
    if (arena != nullptr) charge(*arena, bytes);
    Header* header = nullptr;
    try {
      header = static_cast<Header*>(c10::alloc_cpu(size + sizeof(Header)));
    } catch (...) {
      if (arena != nullptr) discharge(arena, bytes);
      throw;
    }
    *header = {arena, bytes};
    void* data = header + 1;
    return {data, data, &free_block, c10::Device(c10::kCPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }

  void copy_data(void* to, const void* from, size_t count) const override {
    default_copy_data(to, from, count);
  }
};

// Installs the accounting allocator while there is an arena, and libtorch's own one otherwise. A block carries its
// deleter, so blocks allocated before a change are still freed correctly.
class Installation {
 public:
  void add() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (arenas_++ > 0) return;
    original_ = c10::GetCPUAllocator();
    c10::SetCPUAllocator(&allocator_, kPriority);
  }

  void remove() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (--arenas_ == 0) c10::SetCPUAllocator(original_, kPriority);
  }

 private:
  static constexpr uint8_t kPriority = 1;
  std::mutex mutex_;
  int64_t arenas_ = 0;
  c10::Allocator* original_ = nullptr;
  ArenaAllocator allocator_;
};

// Never destroyed: tensors in statics may outlive every destructor.
Installation& installation() {
  static auto* the_one = new Installation;
  return *the_one;
}

}  // namespace

extern "C" {

Arena* brimful_arena_new(const char* name) noexcept {
  installation().add();
  return new Arena(name);
}

void brimful_arena_drop(Arena* arena) noexcept {
  installation().remove();
  release(arena);
}

// Charges this thread's blocks to `arena` until the returned stay is left.
Stay* brimful_arena_enter(Arena* arena) noexcept {
  innermost = new Stay{arena, innermost};
  return innermost;
}

// Guards may be dropped in any order, so `stay` need not be the innermost.
void brimful_arena_leave(Stay* stay) noexcept {
  Stay** link = &innermost;
  while (*link != stay) link = &(*link)->around;
  *link = stay->around;
  delete stay;
}

void brimful_arena_set_limit(Arena* arena, int64_t limit) noexcept { arena->limit = limit; }
int64_t brimful_arena_limit(const Arena* arena) noexcept { return arena->limit; }
int64_t brimful_arena_current(const Arena* arena) noexcept { return arena->current; }
int64_t brimful_arena_peak(const Arena* arena) noexcept { return arena->peak; }
int64_t brimful_arena_allocations(const Arena* arena) noexcept { return arena->allocations; }

void brimful_arena_reset_peak(Arena* arena) noexcept { arena->peak = arena->current.load(); }

int64_t brimful_arena_refusals(const Arena* arena) noexcept { return arena->refusals; }

// Makes `count` allocations fail, the first of them the n-th from now (1 is the next); a count of 0 cancels this.
void brimful_arena_fail(Arena* arena, int64_t n, int64_t count) noexcept {
  arena->doomed_to = 0;
  arena->doomed_from = arena->allocations.load() + n;
  if (count > 0) arena->doomed_to = arena->doomed_from.load() + count;
}

}  // extern "C"
