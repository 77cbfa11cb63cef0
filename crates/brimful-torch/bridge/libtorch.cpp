// Version, location and vector instructions of the running libtorch.

#include <ATen/Context.h>
#include <ATen/Version.h>
#include <dlfcn.h>

#include <cstring>

extern "C" {

char* brimful_show_config() noexcept { return strdup(at::show_config().c_str()); }
char* brimful_cpu_capability() noexcept { return strdup(at::get_cpu_capability().c_str()); }

// Returns the path of the running libtorch, or null.
char* brimful_library_path() noexcept {
  Dl_info info;
  const auto* address = reinterpret_cast<const void*>(&at::globalContext);
  return dladdr(address, &info) != 0 && info.dli_fname != nullptr ? strdup(info.dli_fname)
                                                                  : nullptr;
}

}  // extern "C"
