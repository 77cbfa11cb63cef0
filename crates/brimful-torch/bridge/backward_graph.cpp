// Depth-first traversal of an autograd graph, each node once.

#include "backward_graph.h"

#include "guard.h"
#include "tensors.h"
#include "version.h"

#include <torch/csrc/autograd/variable.h>

BRIMFUL_READ_AGAIN("the node AccumulateGrad, which has no edges, and adds nothing to a frozen leaf");

namespace brimful {

using torch::autograd::edge_list;
using torch::autograd::Node;

void BackwardGraph::add_ends(const edge_list& ends) {
  for (const auto& end : ends) {
    if (!end.is_valid()) continue;
    const auto at = place_of(end.function.get());
    if (std::exchange(places[at].is_entered, true)) continue;
    places[at].leads = kToEnd;
    order.push_back(at);
  }
}

void BackwardGraph::add_roots(const edge_list& roots) {
  for (const auto& root : roots) {
    const auto at = place_of(root.function.get());
    if (!places[at].is_entered) go_through(at);
  }
}

void BackwardGraph::go_through(uint32_t root) {
  enter(root);
  while (!open_.empty()) {
    auto& [at, next] = open_.back();
    auto& place = places[at];
    if (next == place.edges) {
      each_child(place, [&](auto, auto child) { place.leads |= places[child].leads; });
      order.push_back(at);
      open_.pop_back();
      continue;
    }
    const auto child = children[place.first_child + next++];
    if (child != kNone && !places[child].is_entered) enter(child);
  }
}

uint32_t BackwardGraph::place_of(Node* node) {
  const auto [found, is_new] = index_.emplace(node, static_cast<uint32_t>(places.size()));
  if (is_new) places.push_back({node});
  return found->second;
}

void BackwardGraph::enter(uint32_t at) {
  auto* node = places[at].node;
  places[at].is_entered = true;
  places[at].first_child = static_cast<uint32_t>(children.size());
  places[at].edges = node->num_outputs();
  for (const auto& edge : node->next_edges()) {
    children.push_back(edge.is_valid() ? place_of(edge.function.get()) : kNone);
  }
  open_.push_back({at, 0});
  // Only nodes without edges can be leaves; a dynamic_cast of every node would take longer than the traversal.
  if (places[at].edges != 0) return;
  if (const auto* leaf = dynamic_cast<torch::autograd::AccumulateGrad*>(node)) {
    places[at].leads = kToLeaf;
    leaves.push_back(leaf->variable);
  }
}

void BackwardGraph::look_again(uint32_t at) {
  auto child = children.begin() + places[at].first_child;
  for (const auto& edge : places[at].node->next_edges()) {
    *child++ = edge.is_valid() ? find(edge.function.get()) : kNone;
  }
}

at::Tensor BackwardGraph::other_leaf(const KnownLeaves& known) const {
  for (const at::Tensor& leaf : leaves) {
    // A leaf frozen since the forward gets no gradient.
    if (leaf.requires_grad() && !known.has(leaf)) return leaf;
  }
  return at::Tensor();
}

}  // namespace brimful

extern "C" {

int32_t brimful_known_leaves(brimful::KnownLeaves** out, char** message) noexcept {
  return brimful::guarded(message, [&] { *out = new brimful::KnownLeaves(); });
}

int32_t brimful_know_leaves(
    brimful::KnownLeaves* known, at::Tensor* const* leaves, size_t count, char** message) noexcept {
  return brimful::guarded(message, [&] {
    for (size_t i = 0; i < count; ++i) known->add(*leaves[i]);
  });
}

void brimful_forget_leaves(brimful::KnownLeaves* known) noexcept { delete known; }

// Returns null if a backward from the roots reaches only known leaves.
int32_t brimful_other_leaf(
    at::Tensor* const* roots, size_t count, const brimful::KnownLeaves* known, at::Tensor** out,
    char** message) noexcept {
  return brimful::guarded(message, [&] {
    torch::autograd::edge_list edges;
    for (const at::Tensor& root : brimful::list_of(roots, count)) {
      if (root.requires_grad()) edges.push_back(torch::autograd::impl::gradient_edge(root));
    }
    brimful::BackwardGraph graph;
    graph.add_roots(edges);
    const auto leaf = graph.other_leaf(*known);
    *out = leaf.defined() ? new at::Tensor(leaf) : nullptr;
  });
}

}  // extern "C"
