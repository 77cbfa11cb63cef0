// For work of our own that is no operation of libtorch's: what it touches is told by hand.
#pragma once

#include <ATen/core/Tensor.h>

#include <initializer_list>

namespace brimful {

// Lists such work for this thread, if somebody listens: its name, the numbers that the host hands to
// it, and what it reads and writes of tensors that may outlive it. Undefined ones are passed over.
void tell(
    const char* name, std::initializer_list<double> numbers,
    std::initializer_list<const at::Tensor*> read,
    std::initializer_list<const at::Tensor*> written);

}  // namespace brimful
