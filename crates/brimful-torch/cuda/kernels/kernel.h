// Custom kernel: compiled at first use for the device in use, launched on the current stream.
//
// A source includes its argument struct from a header that the C++ side includes too. All functions throw a
// KernelError if libtorch's own operations are to run instead. If memory runs out, they throw an out-of-memory
// error instead, because memory may become free.
#pragma once

#include "gpu.h"
#include "source.h"

#include <memory>
#include <string>
#include <vector>

namespace brimful::kernels {

// Launch configuration. All blocks of a cooperative launch run at the same time, so that they may wait for each
// other.
struct Shape {
  unsigned grid_x, grid_y, block;
  unsigned shared_bytes;
  bool cooperative;
};

class Kernel {
 public:
  // Compiles nothing yet. Kernels of one source with the same defines share a module.
  Kernel(Source source, std::string function, std::vector<std::string> defines);
  ~Kernel();

  // Launches on the current stream of the current device, also in a capture.
  template <class Arguments>
  void launch(const Shape& shape, const Arguments& arguments) const {
    launch_raw(shape, const_cast<Arguments*>(&arguments));
  }

  // Adds a node to the driver's graph on the current device, after these nodes.
  template <class Arguments>
  void* add_node(
      void* graph, const std::vector<void*>& before, const Shape& shape,
      const Arguments& arguments) const {
    return add_node_raw(graph, before, shape, const_cast<Arguments*>(&arguments));
  }

  // Returns the number of blocks of this shape that one multiprocessor of the current device runs at the same
  // time.
  int blocks_at_a_time(unsigned block, unsigned shared_bytes) const;

 private:
  struct Loaded;
  Loaded load(int device) const;
  Loaded& loaded(int device) const;
  void launch_raw(const Shape& shape, void* arguments) const;
  void* add_node_raw(
      void* graph, const std::vector<void*>& before, const Shape& shape, void* arguments) const;
  void* function_for(int device, const Shape& shape) const;

  const Source source_;
  const std::string function_;
  const std::vector<std::string> defines_;
  struct Devices;
  std::unique_ptr<Devices> devices_;
};

// Makes `count` kernel loads fail with this error after `after` others. For tests.
void fail_loads(int after, int count, int error);

}  // namespace brimful::kernels
