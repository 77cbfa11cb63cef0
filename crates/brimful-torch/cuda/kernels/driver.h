// NVIDIA's driver, opened at run time: the few functions that load a kernel and launch it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace brimful::kernels {

// A graph's node that sets memory, as the driver describes it.
struct MemsetNode {
  uintptr_t into;
  size_t pitch;
  unsigned value;
  unsigned element_bytes;
  size_t width;  // elements
  size_t height;
};

// A graph's node that launches a kernel, likewise.
struct KernelNodeParameters {
  void* function;
  unsigned grid_x, grid_y, grid_z;
  unsigned block_x, block_y, block_z;
  unsigned shared_bytes;
  void** arguments;
  void** extra;
};

// The driver's number of the type of node that sets memory.
constexpr int kMemsetNode = 2;

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
  int (*graph_nodes)(void* graph, void** nodes, size_t* count);
  int (*node_type)(void* node, int* type);
  int (*nodes_before)(void* node, void** nodes, size_t* count);
  int (*nodes_after)(void* node, void** nodes, size_t* count);
  int (*memset_node)(void* node, MemsetNode* out);
  int (*add_kernel_node)(
      void** node, void* graph, void* const* before, size_t count,
      const KernelNodeParameters* parameters);
  int (*add_edges)(void* graph, void* const* from, void* const* to, size_t count);
  int (*destroy_node)(void* node);
};

// A KernelError where there is no driver, or one that lacks a function.
const Driver& driver();

// A KernelError with the driver's own name of the error, if it is one.
void check_driver(int error, const char* what);

// Makes the device's context this thread's, where it has none: libtorch's own threads may not have
// asked for one yet.
void enter_context(int device);

}  // namespace brimful::kernels
