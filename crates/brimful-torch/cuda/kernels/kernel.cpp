// Loads a kernel onto a device at first use, and launches it.

#include "kernel.h"

#include "compiler.h"
#include "driver.h"

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAStream.h>

#include <map>
#include <mutex>

namespace brimful::kernels {

namespace {

// Number of the driver's attribute for shared memory, and the default limit.
constexpr int kMaxSharedBytes = 8;
constexpr unsigned kSharedBytesUnasked = 48 << 10;
// Capture mode of the driver in which a module may be loaded.
constexpr int kRelaxed = 2;

// Allows this thread, while it captures, calls that are not part of the captured work.
class Relaxed {
 public:
  Relaxed() { driver().exchange_capture_mode.ask(&mode_); }
  Relaxed(const Relaxed&) = delete;
  Relaxed& operator=(const Relaxed&) = delete;
  ~Relaxed() { driver().exchange_capture_mode.ask(&mode_); }

 private:
  int mode_ = kRelaxed;
};

// Held while a module is loaded.
std::mutex loading;

// Module loads that are to fail, and their error.
struct Doomed {
  int after = 0, count = 0, error = 0;

  // Returns the next load's error, or 0.
  int next() {
    if (count == 0 || after-- > 0) return 0;
    --count;
    return error;
  }
} doomed;

int ask_for_module(void** module, const Cubin& cubin) {
  const int doom = doomed.next();
  return doom != 0 ? doom : driver().load_module.ask(module, cubin.bytes.data());
}

bool is_capturing() {
  const auto status = c10::cuda::currentStreamCaptureStatusMayInitCtx();
  return status != c10::cuda::CaptureStatus::None;
}

// Loads a module. If memory runs out, libtorch's cache is emptied first, as for tensors; not during a capture.
void* load_module(const Cubin& cubin) {
  const Relaxed relaxed;
  void* module = nullptr;
  int answer = ask_for_module(&module, cubin);
  if (answer == kDriverOutOfMemory && !is_capturing()) {
    try {
      c10::cuda::CUDACachingAllocator::emptyCache();
      answer = ask_for_module(&module, cubin);
    } catch (const c10::Error&) {
      // Another thread is capturing, so the cache was not emptied.
    }
  }
  driver().load_module.check(answer);
  return module;
}

void* module_of(const Source& source, const std::vector<std::string>& defines, int device) {
  static std::map<std::string, void*> modules;
  std::string key = source.name + std::string("\n") + std::to_string(device);
  for (const auto& define : defines) key += "\n" + define;
  const std::lock_guard<std::mutex> alone(loading);
  const auto found = modules.find(key);
  if (found != modules.end()) return found->second;
  void* module = load_module(compiled(source, defines, architecture(device)));
  modules.emplace(std::move(key), module);
  return module;
}

void ask_for_shared_bytes(void* function, unsigned& asked, unsigned bytes) {
  if (bytes <= asked) return;
  driver().set_function_attribute(function, kMaxSharedBytes, static_cast<int>(bytes));
  asked = bytes;
}

}  // namespace

// Kernel loaded on one device, or the reason why it is not available.
struct Kernel::Loaded {
  void* function = nullptr;
  std::string failure;
  unsigned shared_bytes = kSharedBytesUnasked;
  std::map<std::pair<unsigned, unsigned>, int> blocks;
};

struct Kernel::Devices {
  std::mutex mutex;
  std::map<int, Loaded> loaded;
};

Kernel::Kernel(Source source, std::string function, std::vector<std::string> defines)
    : source_(source),
      function_(std::move(function)),
      defines_(std::move(defines)),
      devices_(std::make_unique<Devices>()) {}

Kernel::~Kernel() = default;

Kernel::Loaded Kernel::load(int device) const {
  Loaded loaded;
  try {
    enter_context(device);
    void* module = module_of(source_, defines_, device);
    driver().function(&loaded.function, module, function_.c_str());
  } catch (const KernelError& error) {
    // The failure is kept, because another attempt would fail again after another second of compiling.
    loaded.failure = error.what();
  }
  return loaded;
}

// Requires that `devices_->mutex` is locked. A failure for lack of memory is not cached.
Kernel::Loaded& Kernel::loaded(int device) const {
  auto place = devices_->loaded.find(device);
  if (place == devices_->loaded.end()) place = devices_->loaded.emplace(device, load(device)).first;
  Loaded& loaded = place->second;
  if (!loaded.failure.empty()) throw KernelError(function_ + ": " + loaded.failure);
  return loaded;
}

int Kernel::blocks_at_a_time(unsigned block, unsigned shared_bytes) const {
  const int device = c10::cuda::current_device();
  const std::lock_guard<std::mutex> alone(devices_->mutex);
  Loaded& kernel = loaded(device);
  const std::pair shape(block, shared_bytes);
  const auto found = kernel.blocks.find(shape);
  if (found != kernel.blocks.end()) return found->second;
  enter_context(device);
  ask_for_shared_bytes(kernel.function, kernel.shared_bytes, shared_bytes);
  int blocks = 0;
  driver().occupancy(&blocks, kernel.function, static_cast<int>(block), shared_bytes);
  kernel.blocks.emplace(shape, blocks);
  return blocks;
}

void* Kernel::function_for(int device, const Shape& shape) const {
  enter_context(device);
  const std::lock_guard<std::mutex> alone(devices_->mutex);
  Loaded& kernel = loaded(device);
  ask_for_shared_bytes(kernel.function, kernel.shared_bytes, shape.shared_bytes);
  return kernel.function;
}

void* Kernel::add_node_raw(
    void* graph, const std::vector<void*>& before, const Shape& shape, void* arguments) const {
  void* all[] = {arguments};
  const KernelNodeParameters parameters{
      function_for(c10::cuda::current_device(), shape),
      shape.grid_x,
      shape.grid_y,
      1,
      shape.block,
      1,
      1,
      shape.shared_bytes,
      all,
      nullptr};
  void* node = nullptr;
  driver().add_kernel_node(&node, graph, before.data(), before.size(), &parameters);
  return node;
}

void Kernel::launch_raw(const Shape& shape, void* arguments) const {
  const int device = c10::cuda::current_device();
  void* function = function_for(device, shape);
  void* stream = c10::cuda::getCurrentCUDAStream(static_cast<c10::DeviceIndex>(device)).stream();
  void* all[] = {arguments};
  const auto& [grid_x, grid_y, block, shared_bytes, cooperative] = shape;
  if (cooperative) {
    driver().launch_cooperative(
        function, grid_x, grid_y, 1, block, 1, 1, shared_bytes, stream, all);
  } else {
    driver().launch(function, grid_x, grid_y, 1, block, 1, 1, shared_bytes, stream, all, nullptr);
  }
}

void fail_loads(int after, int count, int error) {
  const std::lock_guard<std::mutex> alone(loading);
  doomed = {after, count, error};
}

}  // namespace brimful::kernels
