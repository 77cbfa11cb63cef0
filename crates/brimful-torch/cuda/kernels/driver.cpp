// Looks the driver's functions up by name, so that no header of CUDA's is needed to build.

#include "driver.h"

#include "library.h"
#include "source.h"

#include <string>

namespace brimful::kernels {

namespace {

Driver load_driver() {
  const Library library{dlopen("libcuda.so.1", RTLD_NOW), "the NVIDIA driver"};
  if (library.handle == nullptr) throw KernelError(std::string("no NVIDIA driver: ") + dlerror());
  Driver driver{};
  library.look_up("cuGetErrorName", driver.error_name);
  library.look_up("cuDeviceGet", driver.device);
  library.look_up("cuDeviceGetAttribute", driver.device_attribute);
  library.look_up("cuDevicePrimaryCtxRetain", driver.retain_context);
  library.look_up("cuCtxGetCurrent", driver.current_context);
  library.look_up("cuCtxSetCurrent", driver.set_context);
  library.look_up("cuThreadExchangeStreamCaptureMode", driver.exchange_capture_mode);
  library.look_up("cuModuleLoadData", driver.load_module);
  library.look_up("cuModuleGetFunction", driver.function);
  library.look_up("cuFuncSetAttribute", driver.set_function_attribute);
  library.look_up("cuOccupancyMaxActiveBlocksPerMultiprocessor", driver.occupancy);
  library.look_up("cuLaunchKernel", driver.launch);
  library.look_up("cuLaunchCooperativeKernel", driver.launch_cooperative);
  library.look_up("cuGraphGetNodes", driver.graph_nodes);
  library.look_up("cuGraphNodeGetType", driver.node_type);
  library.look_up("cuGraphNodeGetDependencies", driver.nodes_before);
  library.look_up("cuGraphNodeGetDependentNodes", driver.nodes_after);
  library.look_up("cuGraphMemsetNodeGetParams", driver.memset_node);
  library.look_up("cuGraphAddKernelNode", driver.add_kernel_node);
  library.look_up("cuGraphAddDependencies", driver.add_edges);
  library.look_up("cuGraphDestroyNode", driver.destroy_node);
  return driver;
}

}  // namespace

const Driver& driver() {
  static const Driver loaded = load_driver();
  return loaded;
}

void check_driver(int error, const char* what) {
  if (error == 0) return;
  const char* name = nullptr;
  driver().error_name(error, &name);
  throw KernelError(
      std::string(what) + " failed with " + (name != nullptr ? name : std::to_string(error)));
}

void enter_context(int device) {
  void* context = nullptr;
  check_driver(driver().current_context(&context), "cuCtxGetCurrent");
  if (context != nullptr) return;
  int handle = 0;
  check_driver(driver().device(&handle, device), "cuDeviceGet");
  // Never given back: libtorch holds the same one until the process ends.
  check_driver(driver().retain_context(&context, handle), "cuDevicePrimaryCtxRetain");
  check_driver(driver().set_context(context), "cuCtxSetCurrent");
}

}  // namespace brimful::kernels
