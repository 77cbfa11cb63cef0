// Weight gradients on a second stream, while a backward is captured.
//
//   main    ── of x ──┬── of the next x ──┬── …  ── joined ── gradients arrive in their leaves
//   beside            └── of the weight ──┴── of the next weight ── …  ──┘
//
// No input gradient depends on a weight gradient, and few kernels occupy the whole GPU until they end. The
// tensors that a weight gradient reads are held until the main stream has waited for it, because a capture reuses
// memory in the order of its release.
#pragma once

#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <torch/csrc/autograd/function.h>

#include <deque>
#include <memory>
#include <optional>
#include <vector>

namespace brimful {

// Stream on which this thread computes weight gradients: one for all captures on the device. Before a capture,
// the caller makes cuBLAS allocate its workspace for this stream.
c10::Stream stream_beside(c10::Device device);

class Beside {
 public:
  // Enables the second stream for a backward on this stream, if any. Does nothing unless that stream is
  // capturing.
  void open(const std::optional<c10::Stream>& main);
  bool is_open() const { return side_.has_value(); }

  // Runs a node for its weights on the second stream, and for all else on the main one. If `releases`, frees its
  // saved tensors when both are done.
  torch::autograd::variable_list run(
      torch::autograd::Node& node, const torch::autograd::variable_list& gradients,
      const std::vector<bool>& is_weight, bool releases);

  // Makes the main stream wait for all weight gradients.
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
