// Recording of custom work that is not a libtorch operation.
#pragma once

#include <ATen/core/Tensor.h>

#include <initializer_list>

namespace brimful {

// Records such work if this thread is recording: its name, its host-side numbers, and the tensors it reads and
// writes that may outlive it. Undefined ones are skipped.
void report(
    const char* name, std::initializer_list<double> numbers,
    std::initializer_list<const at::Tensor*> read,
    std::initializer_list<const at::Tensor*> written);

}  // namespace brimful
