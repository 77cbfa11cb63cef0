// Looks the driver's functions up by name, so that no header of CUDA's is needed to build.

#include "driver.h"

#include "source.h"

#include <dlfcn.h>

#include <string>

namespace brimful::kernels {

namespace {

template <class Function>
void look_up(void* library, const char* name, Function& into) {
  into = reinterpret_cast<Function>(dlsym(library, name));
  if (into == nullptr) throw KernelError(std::string("the NVIDIA driver has no ") + name);
}

Driver load() {
  void* library = dlopen("libcuda.so.1", RTLD_NOW);
  if (library == nullptr) throw KernelError(std::string("no NVIDIA driver: ") + dlerror());
  Driver driver{};
  look_up(library, "cuGetErrorName", driver.error_name);
  look_up(library, "cuDeviceGet", driver.device);
  look_up(library, "cuDeviceGetAttribute", driver.device_attribute);
  look_up(library, "cuDevicePrimaryCtxRetain", driver.retain_context);
  look_up(library, "cuCtxGetCurrent", driver.current_context);
  look_up(library, "cuCtxSetCurrent", driver.set_context);
  look_up(library, "cuThreadExchangeStreamCaptureMode", driver.exchange_capture_mode);
  look_up(library, "cuModuleLoadData", driver.load_module);
  look_up(library, "cuModuleGetFunction", driver.function);
  look_up(library, "cuFuncSetAttribute", driver.set_function_attribute);
  look_up(library, "cuOccupancyMaxActiveBlocksPerMultiprocessor", driver.occupancy);
  look_up(library, "cuLaunchKernel", driver.launch);
  look_up(library, "cuLaunchCooperativeKernel", driver.launch_cooperative);
  look_up(library, "cuGraphGetNodes", driver.graph_nodes);
  look_up(library, "cuGraphNodeGetType", driver.node_type);
  look_up(library, "cuGraphNodeGetDependencies", driver.nodes_before);
  look_up(library, "cuGraphNodeGetDependentNodes", driver.nodes_after);
  look_up(library, "cuGraphMemsetNodeGetParams", driver.memset_node);
  look_up(library, "cuGraphAddKernelNode", driver.add_kernel_node);
  look_up(library, "cuGraphAddDependencies", driver.add_edges);
  look_up(library, "cuGraphDestroyNode", driver.destroy_node);
  return driver;
}

}  // namespace

const Driver& driver() {
  static const Driver loaded = load();
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
