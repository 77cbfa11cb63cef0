// How a backward runs without libtorch's engine: who waits for how many gradients, and whose turn it is.

#include "direct_backward.h"

#include "version.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/add.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/flat_hash_map.h>
#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <cstdint>
#include <queue>
#include <string>
#include <utility>
#include <vector>

BRIMFUL_READ_AGAIN(
    "Engine::evaluate_function and call_function: the order of nodes, what is checked, when variables are "
    "released; InputBuffer's accumulate; and who asks for the current graph task");

namespace {

using torch::autograd::AnomalyMode;
using torch::autograd::Edge;
using torch::autograd::edge_list;
using torch::autograd::Node;
using torch::autograd::variable_list;

// What the innermost one on this thread does with its graph.
thread_local std::optional<bool> keeping;

// Whether this thread wants the engine, whatever the graph is.
thread_local bool wants_engine = false;

bool is_in_engine() { return torch::autograd::get_current_graph_task_id() != -1; }

struct Keeping {
  explicit Keeping(bool keep_graph) : before(std::exchange(keeping, keep_graph)) {}
  ~Keeping() { keeping = before; }
  const std::optional<bool> before;
};

// Asks of every node whether the engine is needed for it.
class OneStream {
 public:
  bool takes(Node& node) {
    const bool hooks = !node.pre_hooks().empty() || !node.post_hooks().empty() ||
                       !node.tensor_pre_hooks().empty() || !node.retains_grad_hooks().empty();
    return !hooks && is_on_it(node);
  }

 private:
  bool is_on_it(const Node& node) {
    for (uint32_t at = 0; at < node.num_inputs(); ++at) {
      const auto& input = node.input_metadata(at);
      if (input.was_default_constructed() || input.device().is_cpu()) continue;
      if (!here_) here_ = current(input.device());
      if (input.device() != here_->device() || input.stream() != *here_) return false;
    }
    return true;
  }

  static c10::Stream current(c10::Device like) {
    const auto* devices = c10::impl::getDeviceGuardImpl(like.type());
    return devices->getStream(devices->getDevice());
  }

  std::optional<c10::Stream> here_;
};

// Whether nobody else can see the numbers of what has gathered, so that more may be added in place.
bool is_ours(const at::Tensor& sum) {
  return sum.use_count() == 1 && sum.has_storage() && sum.storage().use_count() == 1 &&
         sum.is_non_overlapping_and_dense() && !sum._is_zerotensor();
}

void gather(at::Tensor& sum, at::Tensor&& gradient) {
  if (!gradient.defined()) return;
  if (!sum.defined()) {
    sum = std::move(gradient);
  } else if (sum.layout() == at::kStrided && gradient.layout() == at::kStrided && is_ours(sum)) {
    sum.add_(gradient);
  } else {
    // Sparse ones can be added to others, not others to them.
    sum = sum.is_sparse() ? at::add(gradient, sum) : at::add(sum, gradient);
  }
}

class DirectRun {
 public:
  DirectRun(const edge_list& ends, const edge_list& passed) : prunes_(!ends.empty()) {
    given_.resize(ends.size() + passed.size());
    for (const Edge& edge : ends) watch(edge).is_end = true;
    for (const Edge& edge : passed) watch(edge).is_passed = true;
  }

  // Whether the graph behind the roots can be run here.
  bool plan(const edge_list& roots) {
    for (const Edge& root : roots) {
      if (!visit(find(root.function.get()))) return false;
    }
    for (size_t at = 0; at < places_.size(); ++at) {
      const auto& place = places_[at];
      if (!place.is_needed || place.is_end) continue;
      for (size_t edge = 0; edge < place.children; ++edge) {
        const auto child = children_[place.first_child + edge];
        if (child == kNone) continue;
        // It would compute a gradient that nobody asks for: the engine can tell it so.
        if (!places_[child].is_needed) return false;
        ++places_[child].awaited;
      }
    }
    return true;
  }

  variable_list run(const edge_list& roots, variable_list&& gradients, bool keep_graph) {
    const at::NoGradGuard no_graph;
    const Keeping kept(keep_graph);
    // Before any of them is ready: a root may wait for another.
    for (size_t i = 0; i < roots.size(); ++i) {
      const auto at = index_.at(roots[i].function.get());
      if (places_[at].is_needed) bring(at, roots[i].input_nr, std::move(gradients[i]));
    }
    for (const Edge& root : roots) {
      const auto at = index_.at(root.function.get());
      if (places_[at].is_needed && places_[at].awaited == 0) get_ready(at);
    }
    while (!ready_.empty()) {
      const auto at = ready_.top().second;
      ready_.pop();
      run_node(at, keep_graph);
    }
    return std::move(given_);
  }

 private:
  static constexpr uint32_t kNone = UINT32_MAX;

  // A gradient that is given out, at its own place among them: which of those that come into a node, and
  // the next one of the same node.
  struct Taken {
    uint32_t input;
    uint32_t next;
  };

  struct Place {
    Node* node;
    size_t first_child = 0;
    size_t children = 0;
    // Nodes that will bring a gradient, or say that there is none.
    size_t awaited = 0;
    bool is_visited = false;
    bool is_needed = false;
    bool is_end = false;
    bool is_passed = false;
    bool is_ready = false;
    uint32_t taken = kNone;
    variable_list gathered = {};
  };

  struct Visit {
    uint32_t at;
    size_t next;
  };

  uint32_t find(Node* node) {
    const auto [found, is_new] = index_.emplace(node, static_cast<uint32_t>(places_.size()));
    if (is_new) places_.push_back({node});
    return found->second;
  }

  Place& watch(const Edge& edge) {
    auto& place = places_[find(edge.function.get())];
    const auto as = static_cast<uint32_t>(taken_.size());
    taken_.push_back({edge.input_nr, std::exchange(place.taken, as)});
    return place;
  }

  // False where the engine is needed for the place itself.
  bool enter(uint32_t at) {
    places_[at].is_visited = true;
    places_[at].is_needed = !prunes_ || places_[at].is_end;
    Node& node = *places_[at].node;
    if (!stream_.takes(node)) return false;
    if (places_[at].is_end) return true;
    places_[at].first_child = children_.size();
    places_[at].children = node.next_edges().size();
    for (const Edge& edge : node.next_edges()) {
      children_.push_back(edge.is_valid() ? find(edge.function.get()) : kNone);
    }
    return true;
  }

  // Goes through all that is behind a place, and finds out what leads to an end.
  bool visit(uint32_t root) {
    if (places_[root].is_visited) return true;
    if (!enter(root)) return false;
    std::vector<Visit> open{{root, 0}};
    while (!open.empty()) {
      auto& [at, next] = open.back();
      if (next == places_[at].children) {
        const bool is_needed = places_[at].is_needed;
        open.pop_back();
        if (!open.empty()) places_[open.back().at].is_needed |= is_needed;
        continue;
      }
      const auto child = children_[places_[at].first_child + next++];
      if (child == kNone) continue;
      if (places_[child].is_visited) {
        places_[at].is_needed |= places_[child].is_needed;
      } else {
        if (!enter(child)) return false;
        open.push_back({child, 0});
      }
    }
    return true;
  }

  void bring(uint32_t at, uint32_t input, at::Tensor&& gradient) {
    auto& place = places_[at];
    if (place.gathered.empty()) place.gathered.resize(place.node->num_inputs());
    gather(place.gathered.at(input), std::move(gradient));
  }

  // Later nodes of the forward first, and leaves before all, as in the engine: so what waits is least.
  void get_ready(uint32_t at) {
    if (std::exchange(places_[at].is_ready, true)) return;
    ready_.emplace(places_[at].node->sequence_nr(), at);
  }

  void run_node(uint32_t at, bool keep_graph) {
    auto& place = places_[at];
    auto gathered = std::move(place.gathered);
    for (auto as = place.taken; as != kNone; as = taken_[as].next) {
      given_[as] = gathered.at(taken_[as].input);
    }
    if (place.is_end) return;
    Node& node = *place.node;
    const bool releases = !keep_graph && !place.is_passed;
    if (releases) node.will_release_variables();
    auto gradients = node(std::move(gathered));
    torch::autograd::validate_outputs(
        node.next_edges(), gradients, [&](const std::string& refusal) {
          return "Function " + node.name() + " returned an " + refusal;
        });
    if (releases) node.release_variables();
    for (size_t edge = 0; edge < place.children; ++edge) {
      const auto child = children_[place.first_child + edge];
      if (child == kNone) continue;
      bring(child, node.next_edge(edge).input_nr, std::move(gradients[edge]));
      if (--places_[child].awaited == 0) get_ready(child);
    }
  }

  const bool prunes_;
  OneStream stream_;
  std::vector<Place> places_;
  ska::flat_hash_map<Node*, uint32_t> index_;
  // Of all places, each one's side by side.
  std::vector<uint32_t> children_;
  std::vector<Taken> taken_;
  variable_list given_;
  std::priority_queue<std::pair<uint64_t, uint32_t>> ready_;
};

}  // namespace

namespace brimful {

std::optional<variable_list> DirectBackward::run() {
  // Inside a task of the engine's, nodes would ask that one what to compute.
  if (wants_engine || AnomalyMode::is_enabled() || is_in_engine()) return std::nullopt;
  DirectRun run(ends, passed);
  if (!run.plan(roots)) return std::nullopt;
  torch::autograd::validate_outputs(
      roots, gradients, [](const std::string& refusal) { return refusal; });
  return run.run(roots, std::move(gradients), keep_graph);
}

bool keeps_graph() {
  // A task of the engine's is inside ours, never around it.
  return is_in_engine() ? torch::autograd::get_current_graph_task_keep_graph()
                        : keeping.value_or(true);
}

}  // namespace brimful

extern "C" {

// Gives what held before.
bool brimful_want_engine(bool wanted) noexcept { return std::exchange(wants_engine, wanted); }

}  // extern "C"
