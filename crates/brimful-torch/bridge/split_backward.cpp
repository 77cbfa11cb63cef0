// Split backward: the input gradients (dX), which earlier stages wait for, and later the weight gradients (dW).
//
//   input set    nodes that lead to an input
//   frontier     nodes of the input set with an edge that leads only to weights
//
//   input part   removes the frontier's edges to weights (a node computes no gradient for a missing edge), runs to
//                the inputs, and keeps the gradients that enter the frontier
//   cut          restores the frontier's edges to weights, and removes those into the input set
//   weight part  runs from the kept gradients to the leaves
//
// Every node that leads to the input set is in it. So the kept gradients are complete when the input part ends,
// and after the cut each frontier node runs once more, for its weights only: a weight used at several depths gets
// a gradient from each use.

#include "backward_graph.h"
#include "direct_backward.h"
#include "guard.h"
#include "kernel_node.h"
#include "owned_gradients.h"
#include "tensors.h"
#include "version.h"

#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/functions/tensor.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

BRIMFUL_READ_AGAIN(
    "Engine::execute, how it captures gradients and skips what nobody asks for; the names of nodes; "
    "CopySlices, which decides by the edges of the node inside it; and AccumulateGrad");

namespace {

using brimful::BackwardGraph;
using brimful::DirectBackward;
using torch::autograd::Edge;
using torch::autograd::edge_list;
using torch::autograd::Engine;
using torch::autograd::Node;
using torch::autograd::variable_list;

// Dead end whose incoming gradients are captured. It never runs.
struct Sink final : Node {
  variable_list apply(variable_list&&) override { return {}; }

  // Adds an input with the same metadata as the edge's target.
  Edge place_like(const Edge& edge) {
    const auto& like = edge.function->input_metadata(edge.input_nr);
    const bool plain = !like.was_default_constructed() && !like.is_nested_tensor();
    const auto place = plain
        ? add_input_metadata(
              like.options(), like.shape_as_dim_vector(), like.is_tensor_subclass(), false,
              like.grad_dtype())
        : add_input_metadata(Node::undefined_input{});
    return Edge(getptr(), place);
  }
};

// Root that hands over its gradients without keeping them: each is freed when its node has run.
struct Feed final : Node {
  Feed(edge_list edges, variable_list gradients)
      : Node(std::move(edges)), gradients(std::move(gradients)) {}
  variable_list apply(variable_list&&) override { return std::move(gradients); }
  variable_list gradients;
};

// Releases a node's saved tensors as soon as it has run.
struct Release final : torch::autograd::FunctionPostHook {
  explicit Release(Node* node) : node(node) {}
  variable_list operator()(const variable_list& outputs, const variable_list&) override {
    node->release_variables();
    return outputs;
  }
  // Not owned: the node owns this hook.
  Node* const node;
};

// Handling of a frontier node.
enum class Run {
  // Runs once for its inputs and once for its weights.
  kTwice,
  // Runs whole: its kernel computes both at once and gains nothing from two runs.
  kWhole,
  // Runs whole because its contents are unknown.
  kUnknown,
};

Run run_of(Node& node) {
  if (const auto* ours = dynamic_cast<brimful::kernels::KernelNode*>(&node)) {
    return ours->is_splittable() ? Run::kTwice : Run::kWhole;
  }
  const std::string name = node.name();
  constexpr std::array kWholeKernels{"NormBackward", "Rnn", "ThnnFused", "PreluKernelBackward"};
  const auto has = [&](const char* part) { return name.find(part) != std::string::npos; };
  if (std::any_of(kWholeKernels.begin(), kWholeKernels.end(), has)) return Run::kWhole;
  if (has("CppNode")) return Run::kUnknown;
  // Names of libtorch's generated derivatives end in a number.
  const bool generated = !name.empty() && name.back() >= '0' && name.back() <= '9';
  return generated || name.rfind("torch::autograd::", 0) == 0 ? Run::kTwice : Run::kUnknown;
}

// Edge that was removed or redirected, and its node.
struct Severed {
  std::shared_ptr<Node> node;
  size_t at;
  Edge edge;
};

// Redirects an edge, or removes it, and keeps the old one: a released node may own others that are still to be
// visited.
void redirect(Node& node, size_t at, const Edge& to, std::vector<Severed>& old) {
  // CopySlices has an inner node, whose own edges decide what it computes.
  if (auto* slices = dynamic_cast<torch::autograd::CopySlices*>(&node)) {
    auto& inner = slices->fn->next_edges();
    if (at < inner.size()) old.push_back({slices->fn, at, std::exchange(inner[at], to)});
  }
  old.push_back({node.getptr(), at, std::exchange(node.next_edges()[at], to)});
}

class SplitBackward {
 public:
  SplitBackward(const variable_list& roots, const variable_list& inputs) {
    for (const at::Tensor& input : inputs) {
      inputs_.push_back(input.requires_grad() ? torch::autograd::impl::gradient_edge(input) : Edge());
      has_inputs_ |= inputs_.back().is_valid();
    }
    for (const at::Tensor& root : roots) {
      if (root.requires_grad()) roots_.push_back(torch::autograd::impl::gradient_edge(root));
    }
    graph_.add_ends(inputs_);
    graph_.add_ends({Edge(collector_, 0)});
    graph_.add_roots(roots_);
    is_frontier_.resize(graph_.places.size());
  }

  // Call before the graph is changed.
  at::Tensor other_leaf(const brimful::KnownLeaves& known) const { return graph_.other_leaf(known); }

  // Removes the edges that the input part does not need.
  void prepare() {
    for (uint32_t at = 0; at < graph_.places.size(); ++at) {
      if (graph_.places[at].leads & BackwardGraph::kToEnd) settle(at);
    }
  }

  // Returns each input's gradient, undefined if there is none. The group's roots are among those given at
  // construction. After the last group the graph is cut.
  variable_list input_gradients(const variable_list& roots, const variable_list& gradients, bool last) {
    DirectBackward inward;
    groups_.emplace_back();
    for (size_t i = 0; i < roots.size(); ++i) {
      if (!roots[i].requires_grad()) continue;
      const auto edge = torch::autograd::impl::gradient_edge(roots[i]);
      const auto leads = graph_.places[graph_.find(edge.function.get())].leads;
      if (leads & BackwardGraph::kToEnd) {
        inward.add(edge, gradients[i]);
      } else if (!has_inputs_ || leads != 0) {
        groups_.back().add(edge, gradients[i]);
      }
    }
    auto result =
        inward.roots.empty() ? variable_list(inputs_.size()) : run_inward(std::move(inward), last);
    if (last) cut();
    return result;
  }

  // Adds the group's weight gradients to those of the leaves. Call it for the groups in order.
  void add_weight_gradients(size_t group) {
    brimful::OwnedGradients owned;
    // This group's starting gradients may belong to the caller, and those of later groups are still needed.
    for (const auto& one : groups_) owned.add(one.gradients);
    run_outward(group, {});
    for (const at::Tensor& leaf : graph_.leaves) owned.make_in(leaf);
  }

  // Returns the group's gradients of these leaves, undefined where there is none, without adding them.
  variable_list weight_gradients(size_t group, const variable_list& leaves) {
    edge_list outputs;
    std::vector<size_t> places;
    for (size_t at = 0; at < leaves.size(); ++at) {
      if (!leaves[at].requires_grad()) continue;
      outputs.push_back(torch::autograd::impl::gradient_edge(leaves[at]));
      places.push_back(at);
    }
    variable_list result(leaves.size());
    // An empty list of ends would mean all leaves.
    if (outputs.empty()) return result;
    brimful::OwnedGradients owned;
    for (const auto& one : groups_) owned.add(one.gradients);
    auto gradients = run_outward(group, outputs);
    for (size_t at = 0; at < gradients.size(); ++at) {
      result[places[at]] = owned.make(std::move(gradients[at]));
    }
    return result;
  }

  const std::string& unknown() const { return unknown_; }

 private:
  // Returns the edges of a place that lead only to weights.
  std::vector<uint32_t> weight_edges(const BackwardGraph::Place& place) const {
    std::vector<uint32_t> found;
    graph_.each_child(place, [&](auto edge, auto child) {
      if (graph_.places[child].leads == BackwardGraph::kToLeaf) found.push_back(edge);
    });
    return found;
  }

  // Decides whether a node of the input set is in the frontier, and which of its edges are kept.
  void settle(uint32_t at) {
    Node& node = *graph_.places[at].node;
    const auto edges = weight_edges(graph_.places[at]);
    if (edges.empty()) return;
    const auto run = run_of(node);
    if (run == Run::kUnknown) unknown_ += (unknown_.empty() ? "" : ", ") + node.name();
    if (run == Run::kTwice) {
      is_frontier_[at] = true;
      for (uint32_t input = 0; input < node.num_inputs(); ++input) {
        passed_.emplace_back(node.getptr(), input);
      }
      for (const auto edge : edges) redirect(node, edge, Edge(), weights_);
    } else {
      // The node's weight gradients come with its input gradients. They are kept until the weight part passes them
      // on.
      for (const auto edge : edges) {
        collected_.push_back(collector_->place_like(node.next_edge(edge)));
        resumed_.push_back(node.next_edge(edge));
        std::vector<Severed> old;
        redirect(node, edge, collected_.back(), old);
      }
    }
    graph_.look_again(at);
  }

  variable_list run_inward(DirectBackward&& half, bool last) {
    brimful::OwnedGradients owned;
    owned.add(half.gradients);
    for (const Edge& input : inputs_) {
      if (input.is_valid()) half.ends.push_back(input);
    }
    const auto count = half.ends.size();
    half.ends.insert(half.ends.end(), collected_.begin(), collected_.end());
    half.passed = passed_;
    half.keep_graph = !last;
    auto gradients = half.run(graph_);
    if (!gradients) gradients = run_by_engine(half);
    keep(gradients->data() + count);
    owned.add(groups_.back().gradients);
    variable_list result;
    auto next = gradients->begin();
    for (const Edge& input : inputs_) {
      result.push_back(input.is_valid() ? owned.make(std::move(*next++)) : at::Tensor());
    }
    return result;
  }

  variable_list run_by_engine(const DirectBackward& half) {
    if (!half.keep_graph) release_on_the_way();
    auto outputs = half.ends;
    outputs.insert(outputs.end(), half.passed.begin(), half.passed.end());
    return Engine::get_default_engine().execute(
        half.roots, half.gradients, /*keep_graph=*/true, /*create_graph=*/false,
        /*accumulate_grad=*/false, outputs);
  }

  // Stores the starting gradients of the last group's weight part.
  void keep(at::Tensor* gradients) {
    for (const auto* edges : {&resumed_, &passed_}) {
      for (const Edge& edge : *edges) {
        // A node without an incoming gradient contributes nothing.
        if (gradients->defined()) groups_.back().add(edge, std::move(*gradients));
        ++gradients;
      }
    }
  }

  // Runs a group's weight part and returns the gradients of `ends`. Without ends, adds to the gradients of all leaves.
  variable_list run_outward(size_t group, const edge_list& ends) {
    DirectBackward half = std::exchange(groups_.at(group), DirectBackward());
    if (half.roots.empty()) return {};
    const auto is_open = [](const DirectBackward& later) { return !later.roots.empty(); };
    const auto later = groups_.begin() + static_cast<ptrdiff_t>(group) + 1;
    half.ends = ends;
    half.keep_graph = std::any_of(later, groups_.end(), is_open);
    if (auto given = half.run(graph_)) return std::move(*given);
    // Placeholder for the gradients that the feed brings: on their device, without elements.
    const auto start = half.gradients.front().new_empty({0});
    auto feed = brimful::kernels::make_node<Feed>(std::move(half.roots), std::move(half.gradients));
    feed->add_input_metadata(start);
    return Engine::get_default_engine().execute(
        {Edge(std::move(feed), 0)}, {start}, half.keep_graph, /*create_graph=*/false,
        /*accumulate_grad=*/ends.empty(), ends);
  }

  void release_on_the_way() {
    for (size_t at = 0; at < graph_.places.size(); ++at) {
      auto* node = graph_.places[at].node;
      const bool inward = graph_.places[at].leads & BackwardGraph::kToEnd;
      if (inward && !is_frontier_[at]) node->add_post_hook(std::make_unique<Release>(node));
    }
  }

  void cut() {
    std::vector<Severed> old;
    for (uint32_t at = 0; at < graph_.places.size(); ++at) {
      if (!is_frontier_[at]) continue;
      Node& node = *graph_.places[at].node;
      for (size_t edge = 0; edge < node.next_edges().size(); ++edge) {
        if (node.next_edge(edge).is_valid()) redirect(node, edge, Edge(), old);
      }
    }
    for (auto& [node, at, edge] : weights_) node->next_edges()[at] = std::move(edge);
    for (uint32_t at = 0; at < graph_.places.size(); ++at) {
      if (is_frontier_[at]) graph_.look_again(at);
    }
    weights_.clear();
    collected_.clear();
    resumed_.clear();
    passed_.clear();
    // Releases the nodes that lead to an input, together with `old`. Their places stay, but no edge leads to
    // them.
    roots_.clear();
  }

  // The whole graph; after the cut, nodes that lead to an input are gone.
  BackwardGraph graph_;
  std::vector<bool> is_frontier_;
  edge_list roots_;
  // One edge for each input; invalid if the input requires no gradient.
  edge_list inputs_;
  bool has_inputs_ = false;
  // Gradients at the frontier that the input part keeps; the weight part starts from them.
  edge_list passed_;
  // Gradients of nodes that run whole, and their original destinations.
  edge_list collected_;
  edge_list resumed_;
  // The frontier's edges to weights, while the input part runs.
  std::vector<Severed> weights_;
  const std::shared_ptr<Sink> collector_ = brimful::kernels::make_node<Sink>();
  // Starting gradients of the weight parts.
  std::vector<DirectBackward> groups_;
  std::string unknown_;
};

void give(variable_list gradients, at::Tensor** out) {
  for (at::Tensor& gradient : gradients) {
    *out++ = gradient.defined() ? new at::Tensor(std::move(gradient)) : nullptr;
  }
}

}  // namespace

extern "C" {

// If `known` is not null and the roots lead to another leaf, returns that leaf and creates no split backward.
int32_t brimful_split_backward(
    at::Tensor* const* roots, size_t count, at::Tensor* const* inputs, size_t input_count,
    const brimful::KnownLeaves* known, SplitBackward** out, at::Tensor** other,
    char** message) noexcept {
  return brimful::guarded(message, [&] {
    auto split = std::make_unique<SplitBackward>(
        brimful::list_of(roots, count), brimful::list_of(inputs, input_count));
    const auto leaf = known == nullptr ? at::Tensor() : split->other_leaf(*known);
    if (leaf.defined()) {
      *other = new at::Tensor(leaf);
      return;
    }
    split->prepare();
    *out = split.release();
  });
}

// `out` has an entry for each input, null if there is no gradient.
int32_t brimful_split_input_gradients(
    SplitBackward* split, at::Tensor* const* roots, at::Tensor* const* gradients, size_t count,
    bool last, at::Tensor** out, char** message) noexcept {
  return brimful::guarded(message, [&] {
    const auto from = brimful::list_of(roots, count);
    give(split->input_gradients(from, brimful::list_of(gradients, count), last), out);
  });
}

int32_t brimful_split_add_weight_gradients(SplitBackward* split, size_t group, char** message) noexcept {
  return brimful::guarded(message, [&] { split->add_weight_gradients(group); });
}

// `out` has an entry for each leaf, null if there is no gradient.
int32_t brimful_split_weight_gradients(
    SplitBackward* split, size_t group, at::Tensor* const* leaves, size_t count, at::Tensor** out,
    char** message) noexcept {
  return brimful::guarded(message, [&] {
    give(split->weight_gradients(group, brimful::list_of(leaves, count)), out);
  });
}

// Returns the names of nodes that ran whole because their contents are unknown, or null.
char* brimful_split_unknown(const SplitBackward* split) noexcept {
  return split->unknown().empty() ? nullptr : strdup(split->unknown().c_str());
}

void brimful_split_free(SplitBackward* split) noexcept { delete split; }

}  // extern "C"
