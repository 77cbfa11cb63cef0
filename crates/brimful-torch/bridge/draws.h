// Detects operations that draw random numbers on the host: those that take a generator and involve no other
// device.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/function_schema.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>

namespace brimful {

inline bool takes_generator(const c10::Argument& argument) {
  const auto* optional = argument.type()->castRaw<c10::OptionalType>();
  return optional && optional->getElementType()->kind() == c10::TypeKind::GeneratorType;
}

// Returns whether a value is on another device, or names one: other devices have their own generators.
inline bool is_elsewhere(const c10::IValue& value) {
  if (value.isTensor()) return value.toTensor().defined() && !value.toTensor().is_cpu();
  return value.isDevice() && !value.toDevice().is_cpu();
}

}  // namespace brimful
