// Kernels in place of memset nodes in captured graphs.
#pragma once

namespace brimful::kernels {

// Replaces each memset node of the driver's graph on this device by a kernel where possible: a kernel starts half
// a microsecond after another kernel, but four or more after a memset node.
void replace_memsets(void* graph, int device);

}  // namespace brimful::kernels
