// CUDA graphs: libtorch's CUDAGraph, with a clean end for captures that fail.

#include "functions.h"

#include "../bridge/device.h"
#include "../bridge/guard.h"
#include "../bridge/version.h"
#include "kernels/memset_nodes.h"

#include <ATen/core/CachingHostAllocator.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <ATen/cuda/CUDAGraph.h>
#include <c10/core/DeviceGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <memory>
#include <tuple>

BRIMFUL_READ_AGAIN(
    "all of at::cuda::CUDAGraph: its protected fields, what capture_end does and in which order, and "
    "what the allocators and generators are told of a capture");

namespace {

class Graph final : public at::cuda::CUDAGraph {
 public:
  // Keeps the graph after the capture, so that it can be changed before `end` instantiates it.
  Graph() : CUDAGraph(/*keep_graph=*/true) {}
  ~Graph() { abandon(); }

  // Captures this thread's work on its current stream, into the pool with this id or a new one. Other threads may
  // still do what a capture forbids, such as allocate pinned memory.
  void begin(c10::MempoolId_t pool) {
    open_ = true;
    capture_begin(pool, cudaStreamCaptureModeThreadLocal);
  }

  // Ends the capture. Checks its status first: libtorch would throw before its allocators and its generator know
  // that the capture is over. libtorch uses the current device's stream, so the capture's device must be current.
  void end(bool own_kernels) {
    const c10::DeviceGuard on(capture_stream_.device());
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    C10_CUDA_CHECK(cudaStreamIsCapturing(capture_stream_, &status));
    TORCH_CHECK(status == cudaStreamCaptureStatusActive, "the work contains something that cannot be captured");
    capture_end();
    open_ = false;
    if (own_kernels) replace_memsets();
    instantiate();
  }

 private:
  void replace_memsets() {
    try {
      brimful::kernels::replace_memsets(graph_, capture_dev_);
    } catch (const brimful::kernels::KernelError&) {
      // A memset node that was not replaced does the same work, with a later start.
    } catch (const c10::OutOfMemoryError&) {
      // Likewise.
    } catch (const std::bad_alloc&) {
      // Likewise.
    }
  }

  // Ends a failed capture, so that stream, allocators and generator stay usable.
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
    quietly([&] {
      c10::cuda::CUDACachingAllocator::endAllocateToPool(capture_dev_, mempool_id_);
      c10::cuda::CUDACachingAllocator::releasePool(capture_dev_, mempool_id_);
    });
    // Pinned memory has a pool with the same id, and a list of captures that refers to this graph.
    quietly([&] {
      at::getHostAllocator(at::kCUDA)->end_allocate_to_pool(mempool_id_);
      at::getHostAllocator(at::kCUDA)->release_pool(mempool_id_);
    });
  }

  // Runs `body` and ignores its error: an allocator that had not begun refuses to end, and has nothing to release.
  template <class Body>
  static void quietly(Body&& body) noexcept {
    char* unheard = nullptr;
    brimful::guarded(&unheard, body);
    free(unheard);
  }

  bool open_ = false;
};

}  // namespace

namespace brimful::graph {

bool is_capturing() {
  auto status = cudaStreamCaptureStatusNone;
  if (cudaStreamIsCapturing(c10::cuda::getCurrentCUDAStream(), &status) != cudaSuccess) {
    // Clears the error, which the next launch would report.
    cudaGetLastError();
    return false;
  }
  return status == cudaStreamCaptureStatusActive;
}

void* begin(int32_t device, const uint64_t* pool) {
  const c10::DeviceGuard on(device_of(device));
  auto graph = std::make_unique<Graph>();
  graph->begin({pool[0], pool[1]});
  return graph.release();
}

void end(void* handle, bool own_kernels, uint64_t* pool) {
  auto* graph = static_cast<Graph*>(handle);
  graph->end(own_kernels);
  std::tie(pool[0], pool[1]) = graph->pool();
}

void replay(void* handle) { static_cast<Graph*>(handle)->replay(); }

void drop(void* handle) noexcept { delete static_cast<Graph*>(handle); }

}  // namespace brimful::graph
