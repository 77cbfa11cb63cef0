// What the shared object of this folder can do, file by file.
#pragma once

#include "../bridge/device.h"
#include "../bridge/guard.h"
#include "../bridge/mirrored.h"

namespace brimful::graph {

int32_t begin(int32_t device, const uint64_t* pool, void** out, char** message) noexcept;
// With kernels of our own in the place of some nodes, or as it was captured.
int32_t end(void* handle, bool own_kernels, uint64_t* pool, char** message) noexcept;
int32_t replay(void* handle, char** message) noexcept;
void drop(void* handle) noexcept;

}  // namespace brimful::graph

namespace brimful::memory {

int32_t share(int32_t device, double* out, char** message) noexcept;
int32_t set_share(int32_t device, double share, char** message) noexcept;

}  // namespace brimful::memory

extern "C" {

// The table of them all, by which src/cuda_object.rs calls them.
struct BrimfulCudaFunctions {
  decltype(&brimful::graph::begin) begin = brimful::graph::begin;
  decltype(&brimful::graph::end) end = brimful::graph::end;
  decltype(&brimful::graph::replay) replay = brimful::graph::replay;
  decltype(&brimful::graph::drop) drop = brimful::graph::drop;
  decltype(&brimful::memory::share) memory_share = brimful::memory::share;
  decltype(&brimful::memory::set_share) set_memory_share = brimful::memory::set_share;
};
BRIMFUL_FIELD(BrimfulCudaFunctions, begin, 0);
BRIMFUL_FIELD(BrimfulCudaFunctions, end, 8);
BRIMFUL_FIELD(BrimfulCudaFunctions, replay, 16);
BRIMFUL_FIELD(BrimfulCudaFunctions, drop, 24);
BRIMFUL_FIELD(BrimfulCudaFunctions, memory_share, 32);
BRIMFUL_FIELD(BrimfulCudaFunctions, set_memory_share, 40);
BRIMFUL_SIZE(BrimfulCudaFunctions, 48);

}  // extern "C"
