// A library that is opened at run time, and the functions in it.
#pragma once

#include "source.h"

#include <dlfcn.h>

#include <string>

namespace brimful::kernels {

struct Library {
  void* handle;
  const char* name;

  // A KernelError where it has no such function.
  template <class Function>
  void look_up(const char* function, Function& into) const {
    into = reinterpret_cast<Function>(dlsym(handle, function));
    if (into == nullptr) throw KernelError(std::string(name) + " has no " + function);
  }
};

}  // namespace brimful::kernels
