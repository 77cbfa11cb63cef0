// Gradients of weights on a stream beside, while a backward is captured.
//
//   main    ── of x ──┬── of the next x ──┬── …  ── joined ── gradients arrive in their leaves
//   beside            └── of the weight ──┴── of the next weight ── …  ──┘
//
// Nothing on the way inwards waits for the gradient of a weight, and few kernels fill a card to their end. What one
// is computed of is held until the main stream has waited for it: a capture's memory is used again in the order in
// which it is let go of.
#pragma once

#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <torch/csrc/autograd/function.h>

#include <deque>
#include <memory>
#include <optional>
#include <vector>

namespace brimful {

// Where this thread computes them: one stream for all that it captures on the device. Who is about to capture has
// cuBLAS take its workspace there before.
c10::Stream stream_beside(c10::Device device);

class Beside {
 public:
  // For a backward on this stream, if it is on one. Of no use where that is not captured.
  void open(const std::optional<c10::Stream>& main);
  bool is_open() const { return side_.has_value(); }

  // Runs a node for its weights on the stream beside, and for all else on the main one. What it has saved is let go
  // of when that is done, if it is to be.
  torch::autograd::variable_list run(
      torch::autograd::Node& node, const torch::autograd::variable_list& gradients,
      const std::vector<bool>& is_weight, bool releases);

  // The main stream goes on when all is done.
  void join();

 private:
  struct Running {
    c10::Event done;
    torch::autograd::variable_list gradients;
    std::shared_ptr<torch::autograd::Node> node;
    bool releases;
  };

  void wait_for_first();

  std::optional<c10::Stream> main_, side_;
  std::deque<Running> running_;
};

}  // namespace brimful
