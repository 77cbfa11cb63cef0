// The graph behind some roots, gone through once: who leads where, and which leaves are there.
//
// Whoever runs it, whole or in halves, goes by its numbers, and looks for no node a second time.
#pragma once

#include "known_leaves.h"

#include <c10/util/flat_hash_map.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include <cstdint>
#include <vector>

namespace brimful {

class BackwardGraph {
 public:
  static constexpr uint32_t kNone = UINT32_MAX;

  enum Leads : uint8_t { kToEnd = 1, kToLeaf = 2 };

  struct Place {
    torch::autograd::Node* node;
    // Its edges, side by side in `children`.
    uint32_t first_child = 0;
    uint32_t edges = 0;
    uint8_t leads = 0;
    bool is_entered = false;
  };

  // Before the roots: what is behind an end is nobody's concern.
  void add_ends(const torch::autograd::edge_list& ends);
  void add_roots(const torch::autograd::edge_list& roots);

  // To be told when a node's edges lead elsewhere than they did: to places of the graph, or nowhere.
  void look_again(uint32_t at);

  // Where a node of the graph is; none for others.
  uint32_t find(torch::autograd::Node* node) const {
    const auto found = index_.find(node);
    return found == index_.end() ? kNone : found->second;
  }

  // Calls `f` with each edge that leads somewhere, and the place behind it.
  template <class F>
  void each_child(const Place& place, F&& f) const {
    for (uint32_t edge = 0; edge < place.edges; ++edge) {
      const auto child = children[place.first_child + edge];
      if (child != kNone) f(edge, child);
    }
  }

  // A leaf that gets a gradient and is neither known nor an end; undefined where there is none.
  at::Tensor other_leaf(const KnownLeaves& known) const;

  std::vector<Place> places;
  // Places behind edges, or none.
  std::vector<uint32_t> children;
  // All places, each after those that it leads to.
  std::vector<uint32_t> order;
  // Tensors that gradients gather in, but the ends: they outlive nodes that are let go of.
  torch::autograd::variable_list leaves;

 private:
  struct Visit {
    uint32_t at;
    uint32_t next;
  };

  uint32_t place_of(torch::autograd::Node* node);
  void go_through(uint32_t root);
  void enter(uint32_t at);

  ska::flat_hash_map<torch::autograd::Node*, uint32_t> index_;
  std::vector<Visit> open_;
};

}  // namespace brimful
