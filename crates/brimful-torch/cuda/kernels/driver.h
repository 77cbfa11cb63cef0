// NVIDIA's driver, opened at run time: the few functions that load a kernel and launch it.
#pragma once

#include <cstddef>

namespace brimful::kernels {

struct Driver {
  int (*error_name)(int error, const char** name);
  int (*device)(int* device, int ordinal);
  int (*device_attribute)(int* value, int attribute, int device);
  int (*retain_context)(void** context, int device);
  int (*current_context)(void** context);
  int (*set_context)(void* context);
  int (*exchange_capture_mode)(int* mode);
  int (*load_module)(void** module, const void* image);
  int (*function)(void** function, void* module, const char* name);
  int (*set_function_attribute)(void* function, int attribute, int value);
  int (*occupancy)(int* blocks, void* function, int threads, size_t shared_bytes);
  int (*launch)(
      void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
      unsigned block_y, unsigned block_z, unsigned shared_bytes, void* stream, void** arguments,
      void** extra);
  int (*launch_cooperative)(
      void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
      unsigned block_y, unsigned block_z, unsigned shared_bytes, void* stream, void** arguments);
};

// A KernelError where there is no driver, or one that lacks a function.
const Driver& driver();

// A KernelError with the driver's own name of the error, if it is one.
void check_driver(int error, const char* what);

// Makes the device's context this thread's, where it has none: libtorch's own threads may not have
// asked for one yet.
void enter_context(int device);

}  // namespace brimful::kernels
