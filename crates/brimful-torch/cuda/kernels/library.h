// A library that is opened at run time, and the functions in it.
#pragma once

#include "source.h"

#include <dlfcn.h>

#include <string>

namespace brimful::kernels {

struct Library {
  void* handle;
  const char* name;
  // Throws what this answer of a function means: that memory ran out, or a KernelError.
  void (*fail)(const char* function, int error);
};

template <class Signature>
class LibraryFunction;

// Such a function, whose answer is 0 or an error.
template <class... Arguments>
class LibraryFunction<int(Arguments...)> {
 public:
  // A KernelError where the library has no such function.
  LibraryFunction(const Library& library, const char* name)
      : function_(reinterpret_cast<int (*)(Arguments...)>(dlsym(library.handle, name))),
        fail_(library.fail),
        name_(name) {
    if (function_ == nullptr) throw KernelError(std::string(library.name) + " has no " + name);
  }

  // What it answers.
  int ask(Arguments... arguments) const { return function_(arguments...); }

  // Throws where that is an error.
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
