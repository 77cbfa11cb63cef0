// What sets memory in a captured graph, done by kernels.
#pragma once

namespace brimful::kernels {

// Puts a kernel in the place of each node of the driver's graph that sets memory on this device, where
// that can be done: a kernel begins half a microsecond after another, but four and more after a node that
// sets memory.
void replace_memsets(void* graph, int device);

}  // namespace brimful::kernels
