// What the CUDA object can do, as the bridge uses it: whether its kernels are to be used, and what to do where one
// fails.
#pragma once

#include "../cuda/functions.h"

#include <ATen/core/Tensor.h>

#include <string>

namespace brimful::kernels {

// Makes the table known, once it is loaded.
void found(const BrimfulCudaFunctions* functions) noexcept;

// The table; null before it is loaded, and where there is no CUDA.
const BrimfulCudaFunctions* functions() noexcept;

// The same for those who cannot do without it: throws where it is not loaded.
const BrimfulCudaFunctions& loaded();

// The table if the tensor is on CUDA and kernels are not switched off, else null.
const BrimfulCudaFunctions* functions_for(const at::Tensor& tensor) noexcept;

// Keeps why libtorch's own operations ran instead, for Rust to say once.
void refused(const std::string& why) noexcept;

}  // namespace brimful::kernels
