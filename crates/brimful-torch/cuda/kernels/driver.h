// NVIDIA's driver, opened at run time: functions that load and launch kernels and edit graphs.
#pragma once

#include "gpu.h"
#include "library.h"

#include <cstddef>
#include <cstdint>

namespace brimful::kernels {

// Memset node of a graph, as the driver describes it.
struct MemsetNode {
  uintptr_t into;
  size_t pitch;
  unsigned value;
  unsigned element_bytes;
  size_t width;  // in elements
  size_t height;
};

// Kernel node of a graph, as the driver describes it.
struct KernelNodeParameters {
  void* function;
  unsigned grid_x, grid_y, grid_z;
  unsigned block_x, block_y, block_z;
  unsigned shared_bytes;
  void** arguments;
  void** extra;
};

// Out-of-memory status of the driver.
constexpr int kDriverOutOfMemory = 2;

// Node type of a memset in the driver.
constexpr int kMemsetNode = 2;

// Opens the driver at first use. Throws a KernelError if there is none.
const Library& driver_library();

struct Driver {
  template <class Signature>
  struct Function : LibraryFunction<Signature> {
    explicit Function(const char* name) : LibraryFunction<Signature>(driver_library(), name) {}
  };

  // Function that tests may make fail.
  template <class Signature>
  struct Launch : Function<Signature> {
    using Function<Signature>::Function;
    template <class... Arguments>
    void operator()(Arguments... arguments) const {
      fail_if_pretended();
      Function<Signature>::operator()(arguments...);
    }
  };

  // On failure each function throws a c10::OutOfMemoryError if the device is out of memory, else a KernelError.
  Function<int(int error, const char** name)> error_name{"cuGetErrorName"};
  Function<int(int* device, int ordinal)> device{"cuDeviceGet"};
  Function<int(int* value, int attribute, int device)> device_attribute{"cuDeviceGetAttribute"};
  Function<int(void** context, int device)> retain_context{"cuDevicePrimaryCtxRetain"};
  Function<int(void** context)> current_context{"cuCtxGetCurrent"};
  Function<int(void* context)> set_context{"cuCtxSetCurrent"};
  Function<int(int* mode)> exchange_capture_mode{"cuThreadExchangeStreamCaptureMode"};
  Function<int(void** module, const void* image)> load_module{"cuModuleLoadData"};
  Function<int(void** function, void* module, const char* name)> function{"cuModuleGetFunction"};
  Function<int(void* function, int attribute, int value)> set_function_attribute{
      "cuFuncSetAttribute"};
  Function<int(int* blocks, void* function, int threads, size_t shared_bytes)> occupancy{
      "cuOccupancyMaxActiveBlocksPerMultiprocessor"};
  Launch<int(
      void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
      unsigned block_y, unsigned block_z, unsigned shared_bytes, void* stream, void** arguments,
      void** extra)> launch{"cuLaunchKernel"};
  Launch<int(
      void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
      unsigned block_y, unsigned block_z, unsigned shared_bytes, void* stream,
      void** arguments)> launch_cooperative{"cuLaunchCooperativeKernel"};
  Function<int(void* graph, void** nodes, size_t* count)> graph_nodes{"cuGraphGetNodes"};
  Function<int(void* node, int* type)> node_type{"cuGraphNodeGetType"};
  Function<int(void* node, void** nodes, size_t* count)> nodes_before{"cuGraphNodeGetDependencies"};
  Function<int(void* node, void** nodes, size_t* count)> nodes_after{
      "cuGraphNodeGetDependentNodes"};
  Function<int(void* node, MemsetNode* out)> memset_node{"cuGraphMemsetNodeGetParams"};
  Function<int(
      void** node, void* graph, void* const* before, size_t count,
      const KernelNodeParameters* parameters)> add_kernel_node{"cuGraphAddKernelNode"};
  Function<int(void* graph, void* const* from, void* const* to, size_t count)> add_edges{
      "cuGraphAddDependencies"};
  Function<int(void* node)> destroy_node{"cuGraphDestroyNode"};
};

// Throws a KernelError if there is no driver, or if it lacks a function.
const Driver& driver();

// Makes the device's context current on this thread if it has none: libtorch's own threads may not have one yet.
void enter_context(int device);

}  // namespace brimful::kernels
