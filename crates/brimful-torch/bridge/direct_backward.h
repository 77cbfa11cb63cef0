// A backward that the thread which asks for it runs by itself, on the stream that it is on.
//
// libtorch's engine serves several devices, several streams and hooks. For that it changes the thread's state
// before and after every node, which is half of what a small backward costs the host, and hands a card's
// work to another thread. A graph on one stream, without hooks, needs none of it: here its nodes run in the
// engine's order, and give what they give there.
#pragma once

#include "backward_graph.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <optional>
#include <utility>

namespace brimful {

struct DirectBackward {
  // Where it begins, each with its gradient.
  torch::autograd::edge_list roots = {};
  torch::autograd::variable_list gradients = {};
  // Gradients that are given out and go no further. Where there are such, nothing runs that leads to none.
  torch::autograd::edge_list ends = {};
  // Gradients that are given out on their way. The nodes behind them keep what they have saved.
  torch::autograd::edge_list passed = {};
  bool keep_graph = false;

  void add(torch::autograd::Edge root, at::Tensor gradient) {
    roots.push_back(std::move(root));
    gradients.push_back(std::move(gradient));
  }

  // The gradients of the ends, and then those that have passed. None where the engine is needed: then nothing
  // has been run, and the gradients are still here. The roots are of this graph.
  std::optional<torch::autograd::variable_list> run(const BackwardGraph& graph);
};

// Whether the backward that is running on this thread, if there is one, leaves its graph for another.
bool keeps_graph();

}  // namespace brimful
