// Replaces the memset nodes of a captured graph by kernels/fill.cu.

#include "memset_nodes.h"

#include "../../kernels/fill_arguments.h"
#include "gpu.h"
#include "driver.h"
#include "kernel.h"
#include "kernel_sources.h"

#include <algorithm>
#include <cstdint>
#include <vector>

namespace brimful::kernels {

namespace {

constexpr unsigned kThreads = 256;
constexpr uint64_t kBytesAThread = 16;
constexpr int64_t kBlocksAProcessor = 4;

const Kernel kernel(fill_source, "fill", {});

using Nodes = std::vector<void*>;

// Reads a list; the driver first returns its length.
Nodes listed(const Driver::Function<int(void*, void**, size_t*)>& list, void* of) {
  size_t count = 0;
  list(of, nullptr, &count);
  Nodes nodes(count);
  if (count > 0) list(of, nodes.data(), &count);
  return nodes;
}

uint32_t pattern_of(const MemsetNode& set) {
  if (set.element_bytes == 1) return (set.value & 0xff) * 0x01010101u;
  return set.element_bytes == 2 ? (set.value & 0xffff) * 0x00010001u : set.value;
}

// Returns whether the kernel can replace the node: it fills only contiguous, aligned memory, as nearly all nodes
// do.
bool is_fillable(const MemsetNode& set) {
  return set.height == 1 && set.into % 16 == 0 && set.width > 0;
}

Shape shape_for(uint64_t bytes, int device) {
  const auto needed = static_cast<int64_t>(bytes / (kThreads * kBytesAThread) + 1);
  const int64_t most = gpu(device).multiprocessors * kBlocksAProcessor;
  return {static_cast<unsigned>(std::min(needed, most)), 1, kThreads, 0, false};
}

void replace(void* graph, void* node, int device) {
  MemsetNode set{};
  driver().memset_node(node, &set);
  if (!is_fillable(set)) return;
  const auto before = listed(driver().nodes_before, node);
  const auto after = listed(driver().nodes_after, node);
  const uint64_t bytes = set.width * set.element_bytes;
  const FillArguments arguments{reinterpret_cast<void*>(set.into), bytes, pattern_of(set)};
  void* filling = kernel.add_node(graph, before, shape_for(bytes, device), arguments);
  const Nodes same(after.size(), filling);
  if (!after.empty()) {
    const auto& add_edges = driver().add_edges;
    const int failed = add_edges.ask(graph, same.data(), after.data(), after.size());
    // Without its edges the fill might overwrite later results.
    if (failed != 0) driver().destroy_node.ask(filling);
    add_edges.check(failed);
  }
  driver().destroy_node(node);
}

}  // namespace

void replace_memsets(void* graph, int device) {
  enter_context(device);
  for (void* node : listed(driver().graph_nodes, graph)) {
    int type = 0;
    driver().node_type(node, &type);
    if (type == kMemsetNode) replace(graph, node, device);
  }
}

}  // namespace brimful::kernels
