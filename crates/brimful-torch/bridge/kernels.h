// Functions of the CUDA object as the bridge uses them: whether to use its kernels, and how to handle a failure.
#pragma once

#include "../cuda/functions.h"

#include <ATen/core/Tensor.h>

#include <string>

namespace brimful::kernels {

// Registers the table once it is loaded.
void found(const BrimfulCudaFunctions* functions) noexcept;

// Returns the table; null before it is loaded and without CUDA.
const BrimfulCudaFunctions* functions() noexcept;

// Returns the table; throws if it is not loaded.
const BrimfulCudaFunctions& loaded();

// Returns the table if the tensor is on CUDA and the kernels are enabled, else null.
const BrimfulCudaFunctions* functions_for(const at::Tensor& tensor) noexcept;

// Records why libtorch's own operations ran instead. Rust reports each reason once.
void refused(const std::string& why) noexcept;

}  // namespace brimful::kernels
