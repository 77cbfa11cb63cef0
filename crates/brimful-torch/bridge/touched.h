// Recording of custom work that is not a libtorch operation.
#pragma once

#include <ATen/core/Tensor.h>

#include <initializer_list>

namespace brimful {

// Records custom work if this thread is recording: the work's name, its host-side numbers, and the tensors it
// reads and writes that may outlive it. Undefined tensors are skipped.
void report(
    const char* name, std::initializer_list<double> numbers,
    std::initializer_list<const at::Tensor*> read,
    std::initializer_list<const at::Tensor*> written);

}  // namespace brimful
