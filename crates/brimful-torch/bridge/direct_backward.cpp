// Backward without libtorch's engine: counts the gradients that each node waits for and orders the nodes.

#include "direct_backward.h"

#include "beside.h"
#include "kernel_node.h"
#include "version.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/add.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
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

using brimful::BackwardGraph;
using torch::autograd::AnomalyMode;
using torch::autograd::Edge;
using torch::autograd::edge_list;
using torch::autograd::Node;
using torch::autograd::variable_list;

// Setting `keep_graph` of this thread's innermost direct backward.
thread_local std::optional<bool> keeping;

// True if this thread wants the engine for every graph.
thread_local bool wants_engine = false;

bool is_in_engine() { return torch::autograd::get_current_graph_task_id() != -1; }

struct Keeping {
  explicit Keeping(bool keep_graph) : before(std::exchange(keeping, keep_graph)) {}
  ~Keeping() { keeping = before; }
  const std::optional<bool> before;
};

// Check of each node: a node without hooks, on the stream of all others, does not need the engine.
class OneStream {
 public:
  bool takes(Node& node) {
    const bool hooks = !node.pre_hooks().empty() || !node.post_hooks().empty() ||
                       !node.tensor_pre_hooks().empty() || !node.retains_grad_hooks().empty();
    return !hooks && is_on_it(node);
  }

  // Returns the stream of all nodes; none if everything is on the CPU.
  const std::optional<c10::Stream>& here() const { return here_; }

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

// Returns whether the sum has no other user, so that a gradient may be added in place.
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
    // A sparse tensor can be added to a dense one, but not the reverse.
    sum = sum.is_sparse() ? at::add(gradient, sum) : at::add(sum, gradient);
  }
}

class DirectRun {
 public:
  DirectRun(const BackwardGraph& graph, const edge_list& ends, const edge_list& passed)
      : graph_(graph), visits_(graph.places.size()), prunes_(!ends.empty()) {
    given_.resize(ends.size() + passed.size());
    for (const Edge& edge : ends) watch(edge, &Visit::is_end);
    for (const Edge& edge : passed) watch(edge, &Visit::is_passed);
  }

  // Returns whether the graph that the roots lead to can run here.
  bool plan(const edge_list& roots) {
    for (const Edge& root : roots) {
      roots_.push_back(graph_.find(root.function.get()));
      visits_[roots_.back()].is_reached = true;
    }
    return reach() && count();
  }

  variable_list run(const edge_list& roots, variable_list&& gradients, bool keep_graph) {
    const at::NoGradGuard no_graph;
    const Keeping kept(keep_graph);
    // Gather all gradients before any node is ready: a root may wait for another root's node.
    for (size_t i = 0; i < roots.size(); ++i) {
      const auto at = roots_[i];
      if (visits_[at].is_needed) bring(at, roots[i].input_nr, std::move(gradients[i]));
    }
    for (const auto at : roots_) {
      if (visits_[at].is_needed && visits_[at].awaited == 0) get_ready(at);
    }
    beside_.open(stream_.here());
    run_all(keep_graph);
    beside_.join();
    for (auto& late : late_) arrive(late.at, late.input, std::move(late.gradient));
    run_all(keep_graph);
    return std::move(given_);
  }

 private:
  static constexpr uint32_t kNone = BackwardGraph::kNone;

  // Requested gradient, indexed as in the result: the node's input it arrives at, and the next request of the
  // same node.
  struct Taken {
    uint32_t input;
    uint32_t next;
  };

  // Gradient computed on the second stream, and its destination.
  struct Late {
    uint32_t at;
    uint32_t input;
    at::Tensor gradient;
  };

  // Run state of a place of the graph.
  struct Visit {
    // Nodes that bring a gradient or report that there is none: in total, and still outstanding.
    uint32_t bringing = 0;
    uint32_t awaited = 0;
    uint32_t taken = kNone;
    bool is_reached = false;
    bool is_needed = false;
    bool is_end = false;
    bool is_passed = false;
    bool is_ready = false;
    variable_list gathered = {};
  };

  void watch(const Edge& edge, bool Visit::*as) {
    const auto place = static_cast<uint32_t>(taken_.size());
    taken_.push_back({edge.input_nr, kNone});
    const auto at = graph_.find(edge.function.get());
    // No gradient reaches an end that is not in the graph.
    if (at == kNone) return;
    visits_[at].*as = true;
    taken_[place].next = std::exchange(visits_[at].taken, place);
  }

  // Marks all places that the roots lead to. Returns false if some node needs the engine.
  bool reach() {
    for (auto next = graph_.order.rbegin(); next != graph_.order.rend(); ++next) {
      if (!visits_[*next].is_reached) continue;
      const auto& place = graph_.places[*next];
      if (!stream_.takes(*place.node)) return false;
      if (visits_[*next].is_end) continue;
      graph_.each_child(place, [&](auto, auto child) { visits_[child].is_reached = true; });
    }
    return true;
  }

  // Determines which places lead to an end, and how many gradients each waits for. Returns false if the engine is
  // needed.
  bool count() {
    bool in_vain = false;
    for (const auto at : graph_.order) {
      auto& visit = visits_[at];
      if (!visit.is_reached) continue;
      visit.is_needed = !prunes_ || visit.is_end;
      if (visit.is_end) continue;
      const auto& place = graph_.places[at];
      graph_.each_child(
          place, [&](auto, auto child) { visit.is_needed |= visits_[child].is_needed; });
      if (!visit.is_needed) continue;
      graph_.each_child(place, [&](auto, auto child) {
        visits_[child].bringing = ++visits_[child].awaited;
        // The node would compute an unneeded gradient; only the engine can disable that.
        in_vain |= !visits_[child].is_needed;
      });
    }
    return !in_vain;
  }

  void bring(uint32_t at, uint32_t input, at::Tensor&& gradient) {
    auto& gathered = visits_[at].gathered;
    if (gathered.empty()) gathered.resize(graph_.places[at].node->num_inputs());
    gather(gathered.at(input), std::move(gradient));
  }

  // Queues a node. Nodes created later in the forward run first, and leaves before all others, as in the engine:
  // this minimises the pending gradients.
  void get_ready(uint32_t at) {
    if (std::exchange(visits_[at].is_ready, true)) return;
    ready_.emplace(graph_.places[at].node->sequence_nr(), at);
  }

  void arrive(uint32_t at, uint32_t input, at::Tensor&& gradient) {
    bring(at, input, std::move(gradient));
    if (--visits_[at].awaited == 0) get_ready(at);
  }

  void run_all(bool keep_graph) {
    while (!ready_.empty()) {
      const auto at = ready_.top().second;
      ready_.pop();
      run_node(at, keep_graph);
    }
  }

  // Returns, for each edge of a place, whether it leads to a leaf that no other node brings a gradient to. Empty if
  // all edges or none do, and for a node whose weight gradient is no separate product or convolution.
  std::vector<bool> weights_of(const BackwardGraph::Place& place) const {
    const auto* ours = dynamic_cast<const brimful::kernels::KernelNode*>(place.node);
    const bool split =
        ours != nullptr ? ours->is_splittable() : place.node->name() == "ConvolutionBackward0";
    if (!split) return {};
    std::vector<bool> is_weight(place.edges);
    bool weights = false, others = false;
    graph_.each_child(place, [&](auto edge, auto child) {
      const auto* node = graph_.places[child].node;
      is_weight[edge] = visits_[child].bringing == 1 &&
                        dynamic_cast<const torch::autograd::AccumulateGrad*>(node) != nullptr;
      (is_weight[edge] ? weights : others) = true;
    });
    return weights && others ? is_weight : std::vector<bool>();
  }

  void run_node(uint32_t at, bool keep_graph) {
    auto& visit = visits_[at];
    const auto& place = graph_.places[at];
    auto gathered = std::move(visit.gathered);
    for (auto as = visit.taken; as != kNone; as = taken_[as].next) {
      given_[as] = gathered.at(taken_[as].input);
    }
    if (visit.is_end) return;
    Node& node = *place.node;
    const bool releases = !keep_graph && !visit.is_passed;
    if (releases) node.will_release_variables();
    const auto is_weight = beside_.is_open() ? weights_of(place) : std::vector<bool>();
    const bool aside = !is_weight.empty();
    auto gradients = aside ? beside_.run(node, gathered, is_weight, releases) : node(std::move(gathered));
    torch::autograd::validate_outputs(
        node.next_edges(), gradients, [&](const std::string& refusal) {
          return "Function " + node.name() + " returned an " + refusal;
        });
    if (releases && !aside) node.release_variables();
    graph_.each_child(place, [&](auto edge, auto child) {
      const auto input = node.next_edge(edge).input_nr;
      if (aside && is_weight[edge]) {
        late_.push_back({child, input, std::move(gradients[edge])});
      } else {
        arrive(child, input, std::move(gradients[edge]));
      }
    });
  }

  const BackwardGraph& graph_;
  std::vector<Visit> visits_;
  const bool prunes_;
  OneStream stream_;
  brimful::Beside beside_;
  std::vector<Late> late_;
  std::vector<uint32_t> roots_;
  std::vector<Taken> taken_;
  variable_list given_;
  std::priority_queue<std::pair<uint64_t, uint32_t>> ready_;
};

}  // namespace

namespace brimful {

// Returns whether this thread needs the engine whatever the graph is.
static bool needs_engine() {
  // Inside an engine task, nodes would ask that task which outputs to compute. Inside a direct backward, a sum
  // could be added to on two streams.
  return wants_engine || AnomalyMode::is_enabled() || is_in_engine() || keeping.has_value();
}

std::optional<variable_list> DirectBackward::run(const BackwardGraph& graph) {
  if (needs_engine()) return std::nullopt;
  DirectRun run(graph, ends, passed);
  if (!run.plan(roots)) return std::nullopt;
  torch::autograd::validate_outputs(
      roots, gradients, [](const std::string& refusal) { return refusal; });
  return run.run(roots, std::move(gradients), keep_graph);
}

bool keeps_graph() {
  // An engine task can be nested in a direct backward, never the reverse.
  return is_in_engine() ? torch::autograd::get_current_graph_task_keep_graph()
                        : keeping.value_or(true);
}

}  // namespace brimful

extern "C" {

// Returns the previous setting.
bool brimful_want_engine(bool wanted) noexcept { return std::exchange(wants_engine, wanted); }

}  // extern "C"
