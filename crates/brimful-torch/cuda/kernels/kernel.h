// A kernel of our own: compiled for the device at hand at first use, launched on the current stream.
//
// A source includes what its arguments look like from a header that the C++ side includes too, so that
// both see one struct. All throw a KernelError, upon which libtorch's own operations are to run, or that memory ran
// out, which is no reason for that: it may come free.
#pragma once

#include "card.h"
#include "source.h"

#include <memory>
#include <string>
#include <vector>

namespace brimful::kernels {

// How a kernel is launched. The blocks of a cooperative launch all run at the same time, so that they
// may wait for each other.
struct Shape {
  unsigned grid_x, grid_y, block;
  unsigned shared_bytes;
  bool cooperative;
};

class Kernel {
 public:
  // Nothing is compiled yet. Kernels of one source and the same defines share a module.
  Kernel(Source source, std::string function, std::vector<std::string> defines);
  ~Kernel();

  // On the current stream of the current device, in a capture too.
  template <class Arguments>
  void launch(const Shape& shape, const Arguments& arguments) const {
    launch_raw(shape, const_cast<Arguments*>(&arguments));
  }

  // As a node of the driver's graph on the current device, after these nodes.
  template <class Arguments>
  void* add_node(
      void* graph, const std::vector<void*>& before, const Shape& shape,
      const Arguments& arguments) const {
    return add_node_raw(graph, before, shape, const_cast<Arguments*>(&arguments));
  }

  // How many blocks of this shape one multiprocessor of the current device runs at the same time.
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

// Has the driver give this answer to so many loads of kernels, after so many others. For tests.
void fail_loads(int after, int count, int error);

}  // namespace brimful::kernels
