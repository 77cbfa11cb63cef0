// Library opened at run time, and its functions.
#pragma once

#include "source.h"

#include <dlfcn.h>

#include <string>

namespace brimful::kernels {

struct Library {
  void* handle;
  const char* name;
  // Throws for this status of a function: out of memory, or a KernelError.
  void (*fail)(const char* function, int error);
};

template <class Signature>
class LibraryFunction;

// Library function that returns 0 or an error.
template <class... Arguments>
class LibraryFunction<int(Arguments...)> {
 public:
  // Throws a KernelError if the library has no such function.
  LibraryFunction(const Library& library, const char* name)
      : function_(reinterpret_cast<int (*)(Arguments...)>(dlsym(library.handle, name))),
        fail_(library.fail),
        name_(name) {
    if (function_ == nullptr) throw KernelError(std::string(library.name) + " has no " + name);
  }

  // Calls it and returns its status.
  int ask(Arguments... arguments) const { return function_(arguments...); }

  // Calls it and throws if it fails.
  void operator()(Arguments... arguments) const { check(ask(arguments...)); }

  void check(int error) const {
    if (error != 0) fail_(name_, error);
  }

 private:
  int (*function_)(Arguments...);
  void (*fail_)(const char* function, int error);
  const char* name_;
};

}  // namespace brimful::kernels
