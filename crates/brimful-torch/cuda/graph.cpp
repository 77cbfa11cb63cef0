// Work on a CUDA stream, captured once and replayed: libtorch's own CUDAGraph, and a clean end for
// captures that fail.

#include "functions.h"

#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <ATen/cuda/CUDAGraph.h>
#include <c10/core/DeviceGuard.h>

using brimful::guarded;

namespace {

class Graph final : public at::cuda::CUDAGraph {
 public:
  ~Graph() { abandon(); }

  // Captures what this thread puts on its current stream, into the pool of this id or a new one.
  // Other threads may go on with what a capture forbids, such as asking for page-locked memory.
  void begin(c10::MempoolId_t pool) {
    open_ = true;
    capture_begin(pool, cudaStreamCaptureModeThreadLocal);
  }

  // libtorch would throw before it has told its allocator and its generator that the capture is over.
  void end() {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    C10_CUDA_CHECK(cudaStreamIsCapturing(capture_stream_, &status));
    TORCH_CHECK(status == cudaStreamCaptureStatusActive, "something in it cannot be captured");
    capture_end();
    open_ = false;
  }

 private:
  // Ends a capture that failed half-way, so that stream, allocator and generator can be used again.
  void abandon() noexcept {
    if (!open_ || capture_ended_) return;
    cudaGraph_t part = nullptr;
    cudaStreamEndCapture(capture_stream_, &part);
    if (part != nullptr) cudaGraphDestroy(part);
    cudaGetLastError();
    for (auto& [state, increment] : captured_generator_states_) {
      state->capturing_ = false;
      state->offset_intragraph_ = 0;
    }
    char* unheard = nullptr;
    guarded(&unheard, [&] {
      c10::cuda::CUDACachingAllocator::endAllocateToPool(capture_dev_, mempool_id_);
      c10::cuda::CUDACachingAllocator::releasePool(capture_dev_, mempool_id_);
    });
    free(unheard);
  }

  bool open_ = false;
};

}  // namespace

namespace brimful::graph {

int32_t begin(int32_t device, const uint64_t* pool, void** out, char** message) noexcept {
  return guarded(message, [&] {
    const c10::DeviceGuard on(device_of(device));
    auto graph = std::make_unique<Graph>();
    graph->begin({pool[0], pool[1]});
    *out = graph.release();
  });
}

int32_t end(void* handle, uint64_t* pool, char** message) noexcept {
  return guarded(message, [&] {
    auto* graph = static_cast<Graph*>(handle);
    graph->end();
    const auto [first, second] = graph->pool();
    pool[0] = first;
    pool[1] = second;
  });
}

int32_t replay(void* handle, char** message) noexcept {
  return guarded(message, [&] { static_cast<Graph*>(handle)->replay(); });
}

void drop(void* handle) noexcept { delete static_cast<Graph*>(handle); }

}  // namespace brimful::graph
