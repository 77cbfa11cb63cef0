// Backward that runs on the calling thread, on its current stream.
//
// libtorch's engine serves several devices, several streams and hooks. For that it changes the thread's state
// before and after every node, which is half of a small backward's host time, and hands a GPU's work to another
// thread. A graph on one stream without hooks needs none of that: here its nodes run in the engine's order, with
// the same results.
#pragma once

#include "backward_graph.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <optional>
#include <utility>

namespace brimful {

struct DirectBackward {
  // Edges at which the backward starts, each with its gradient.
  torch::autograd::edge_list roots = {};
  torch::autograd::variable_list gradients = {};
  // Edges whose gradients are returned and not propagated. If there are any, only nodes that lead to one of them
  // run.
  torch::autograd::edge_list ends = {};
  // Edges whose gradients are returned, and also propagated. The nodes that they lead to keep their saved tensors.
  torch::autograd::edge_list passed = {};
  bool keep_graph = false;

  void add(torch::autograd::Edge root, at::Tensor gradient) {
    roots.push_back(std::move(root));
    gradients.push_back(std::move(gradient));
  }

  // Returns the gradients of the ends, then those in `passed`. Returns none if the engine is needed: then nothing
  // has run and the gradients are still here. The roots must be in this graph.
  std::optional<torch::autograd::variable_list> run(const BackwardGraph& graph);
};

// Returns whether the backward in progress on this thread, if any, keeps its graph.
bool keeps_graph();

}  // namespace brimful
