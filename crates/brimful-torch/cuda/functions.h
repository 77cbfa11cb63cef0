// What the shared object of this folder can do, file by file.
#pragma once

#include "../bridge/guard.h"

namespace brimful::graph {

int32_t begin(int32_t device, const uint64_t* pool, void** out, char** message) noexcept;
int32_t end(void* handle, uint64_t* pool, char** message) noexcept;
int32_t replay(void* handle, char** message) noexcept;
void drop(void* handle) noexcept;

}  // namespace brimful::graph

namespace brimful::memory {

int32_t share(int32_t device, double* out, char** message) noexcept;
int32_t set_share(int32_t device, double share, char** message) noexcept;

}  // namespace brimful::memory
