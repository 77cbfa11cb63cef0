// Autograd graph that some roots lead to, traversed once: which nodes lead to an end or a leaf, and all leaves.
//
// Backwards, whole or split, use its node indices and never look a node up a second time.
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
    // Edges of the node, consecutive in `children`.
    uint32_t first_child = 0;
    uint32_t edges = 0;
    uint8_t leads = 0;
    bool is_entered = false;
  };

  // Call before `add_roots`: the traversal stops at the ends.
  void add_ends(const torch::autograd::edge_list& ends);
  void add_roots(const torch::autograd::edge_list& roots);

  // Rereads a node's edges after they were redirected to other places of the graph, or removed.
  void look_again(uint32_t at);

  // Returns the index of a node in the graph; `kNone` for other nodes.
  uint32_t find(torch::autograd::Node* node) const {
    const auto found = index_.find(node);
    return found == index_.end() ? kNone : found->second;
  }

  // Calls `f` with each valid edge and the place that it leads to.
  template <class F>
  void each_child(const Place& place, F&& f) const {
    for (uint32_t edge = 0; edge < place.edges; ++edge) {
      const auto child = children[place.first_child + edge];
      if (child != kNone) f(edge, child);
    }
  }

  // Returns a leaf that requires a gradient and is neither known nor an end; undefined if there is none.
  at::Tensor other_leaf(const KnownLeaves& known) const;

  std::vector<Place> places;
  // Index of the place that each edge leads to, or `kNone`.
  std::vector<uint32_t> children;
  // All places, each after the places that it leads to.
  std::vector<uint32_t> order;
  // Tensors that accumulate gradients, except the ends. They outlive released nodes.
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
