// Takes the nodes that set memory out of a captured graph, and puts kernels/fill.cu in their place.

#include "memset_nodes.h"

#include "../../kernels/fill_arguments.h"
#include "card.h"
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

using Nodes = std::vector<void*>;

// A list of which the driver first says how long it is.
template <class Ask>
Nodes listed(const char* what, Ask&& ask) {
  size_t count = 0;
  check_driver(ask(nullptr, &count), what);
  Nodes nodes(count);
  if (count > 0) check_driver(ask(nodes.data(), &count), what);
  return nodes;
}

uint32_t pattern_of(const MemsetNode& set) {
  if (set.element_bytes == 1) return (set.value & 0xff) * 0x01010101u;
  return set.element_bytes == 2 ? (set.value & 0xffff) * 0x00010001u : set.value;
}

// Only what is one piece, as nearly all is.
bool is_fillable(const MemsetNode& set) {
  return set.height == 1 && set.into % 16 == 0 && set.width > 0;
}

Shape shape_for(uint64_t bytes, int device) {
  const auto needed = static_cast<int64_t>(bytes / (kThreads * kBytesAThread) + 1);
  const int64_t most = card(device).multiprocessors * kBlocksAProcessor;
  return {static_cast<unsigned>(std::min(needed, most)), 1, kThreads, 0, false};
}

void replace(void* graph, void* node, int device) {
  static const Kernel kernel(fill_source, "fill", {});
  MemsetNode set{};
  check_driver(driver().memset_node(node, &set), "cuGraphMemsetNodeGetParams");
  if (!is_fillable(set)) return;
  const auto before = listed("cuGraphNodeGetDependencies", [&](void** nodes, size_t* count) {
    return driver().nodes_before(node, nodes, count);
  });
  const auto after = listed("cuGraphNodeGetDependentNodes", [&](void** nodes, size_t* count) {
    return driver().nodes_after(node, nodes, count);
  });
  const uint64_t bytes = set.width * set.element_bytes;
  const FillArguments arguments{reinterpret_cast<void*>(set.into), bytes, pattern_of(set)};
  void* filling = kernel.add_node(graph, before, shape_for(bytes, device), arguments);
  const Nodes same(after.size(), filling);
  if (!after.empty()) {
    const int failed =
        driver().add_edges(graph, same.data(), after.data(), after.size());
    // Without them it might fill what others have written since.
    if (failed != 0) driver().destroy_node(filling);
    check_driver(failed, "cuGraphAddDependencies");
  }
  check_driver(driver().destroy_node(node), "cuGraphDestroyNode");
}

}  // namespace

void replace_memsets(void* graph, int device) {
  enter_context(device);
  const auto nodes = listed("cuGraphGetNodes", [&](void** nodes, size_t* count) {
    return driver().graph_nodes(graph, nodes, count);
  });
  for (void* node : nodes) {
    int type = 0;
    check_driver(driver().node_type(node, &type), "cuGraphNodeGetType");
    if (type == kMemsetNode) replace(graph, node, device);
  }
}

}  // namespace brimful::kernels
