// Chooses grids and shared memory for BatchNorm's kernels, and launches them: one cooperative launch if all
// blocks fit on the GPU at the same time, else two plain ones.

#include "batch_norm.h"

#include "../../kernels/batch_norm_arguments.h"
#include "kernel_family.h"
#include "kernel_sources.h"
#include "number_kind.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <limits>
#include <mutex>
#include <set>

namespace brimful::kernels {

namespace {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;
// A slice is 64 channels of vectors, or 32 of single numbers.
constexpr int kSliceChannels = 64;
constexpr int kSliceNumbers = 32;
// Blocks per multiprocessor, for launches whose blocks need not run at the same time.
constexpr int kPlainBlocks = 2;
// Indices of vectors and rows have 31 bits, including some beyond the last one.
constexpr int64_t kMaxVectors = std::numeric_limits<int32_t>::max() - (1 << 16);

// Part of the work that a launch does, numbered as in kernels/batch_norm_common.cuh.
enum Pass {
  kFirstHalf = 1, kSecondHalf, kWhole, kStatistics, kFinish, kFixed, kMoments, kFinishMoments
};

// Access pattern of a tensor: its dtype, numbers per load, and lanes side by side.
struct Reading {
  int kind, width, lanes;
  int rows, channels;
  // Rows that one thread handles together: the pixels of a square, for a pooling.
  int together = 1;

  Reading(const at::Tensor& x, bool aligned) : kind(number_kind(x)) {
    const int64_t all = x.numel();
    const int64_t in_rows = x.size(1);
    const int vector = x.element_size() == 4 ? 4 : 8;
    width = aligned && in_rows % vector == 0 ? vector : 1;
    if (all / width >= kMaxVectors) throw KernelError("libtorch handles 2^31 vectors and more");
    channels = static_cast<int>(in_rows);
    rows = static_cast<int>(all / in_rows);
    const int most = width == 1 ? kSliceNumbers : kSliceChannels / width;
    for (lanes = 1; lanes < most && lanes < channels / width;) lanes *= 2;
  }

  // Access pattern in which rows are counted by squares of pixels.
  static Reading by_squares(const at::Tensor& x, bool aligned) {
    Reading reading(x, aligned);
    reading.rows = static_cast<int>(4 * squares_of(x));
    reading.together = 4;
    return reading;
  }

  int slice_channels() const { return lanes * width; }
  int slices() const { return (channels + slice_channels() - 1) / slice_channels(); }
  int rows_a_step() const { return kThreads / lanes; }
  // Bytes of one tensor that a block keeps per step.
  size_t slot_bytes() const { return size_t{kThreads} * width * (kind == 0 ? 4 : 2); }
};

constexpr Define kKind{"KIND", kNumberKinds};
constexpr Define kWidth{"WIDTH"}, kLanes{"LANES"}, kThreadCount{"THREADS"}, kPass{"PASS"};
// Index of PASS in both families.
constexpr size_t kPassPlace = 4;

const KernelFamily<7> forward_family(
    batch_norm_forward_source,
    {kKind, kWidth, kLanes, kThreadCount, kPass, Define{"RELU"}, Define{"RESIDUAL"}});
const KernelFamily<10> backward_family(
    batch_norm_backward_source,
    {kKind, kWidth, kLanes, kThreadCount, kPass, Define{"MASK"}, Define{"MORE"}, Define{"KEEP"},
     Define{"OTHER"}, Define{"POOL"}});
const KernelFamily<4> pool_family(batch_norm_pool_source, {kKind, kWidth, kLanes, kThreadCount});

// Compile-time options of a backward, besides the access pattern.
struct BackwardParts {
  int mask, more, keep, other, pool;
};

std::array<int, 7> forward_numbers(const Reading& r, Pass pass, int relu, int residual) {
  return {r.kind, r.width, r.lanes, kThreads, pass, relu, residual};
}

std::array<int, 10> backward_numbers(const Reading& r, Pass pass, const BackwardParts& parts) {
  const auto& [mask, more, keep, other, pool] = parts;
  return {r.kind, r.width, r.lanes, kThreads, pass, mask, more, keep, other, pool};
}

std::array<int, 4> pool_numbers(const Reading& r) { return {r.kind, r.width, r.lanes, kThreads}; }

// Returns the kernels that a residual network uses in training after its first one, in the order of their use.
std::vector<Compiling> likely(const Reading& reading) {
  std::vector<Compiling> all;
  const auto forward = [&](Pass pass, int relu, int residual) {
    all.push_back(forward_family.compiling(forward_numbers(reading, pass, relu, residual)));
  };
  const auto backward = [&](const BackwardParts& parts) {
    all.push_back(backward_family.compiling(backward_numbers(reading, kWhole, parts)));
  };
  forward(kStatistics, 0, 0);
  all.push_back(pool_family.compiling(pool_numbers(reading)));
  forward(kWhole, 1, 0);
  forward(kWhole, 1, 2);
  forward(kWhole, 1, 1);
  backward({2, 0, 1, 0, 0});
  backward({1, 0, 0, 0, 0});
  // A block's output followed by another block has two consumers.
  backward({2, 1, 1, 0, 0});
  backward({2, 1, 0, 1, 0});
  backward({1, 0, 0, 0, 1});
  return all;
}

// Compiles the likely kernels ahead when a layer with this access pattern is first trained.
void expect_others(const Reading& reading, int device) {
  static std::mutex mutex;
  static std::set<std::array<int, 3>> seen;
  {
    const std::lock_guard<std::mutex> alone(mutex);
    if (!seen.insert({reading.kind, reading.width, reading.lanes}).second) return;
  }
  compile_ahead(likely(reading), architecture(device));
}

// Distribution of the rows over blocks.
struct Plan {
  int blocks, chunk, slots;
  unsigned shared_bytes;
  bool cooperative;
};

Plan shared_out(const Reading& reading, int blocks) {
  const int even = (reading.rows + blocks - 1) / blocks;
  const int together = reading.together;
  const int least = std::max(even, std::min(reading.rows_a_step(), reading.rows));
  const int chunk = (least + together - 1) / together * together;
  return {(reading.rows + chunk - 1) / chunk, chunk, 0, 0, false};
}

// Plans a cooperative launch. `fixed_bytes` is the kernel's own shared memory; `tensors` is the number of tensors
// it keeps there.
Plan whole_plan(const Reading& reading, const Gpu& gpu, size_t fixed_bytes, int tensors) {
  Plan plan = shared_out(reading, std::max(1, gpu.multiprocessors / reading.slices()));
  plan.cooperative = reading.slices() <= gpu.multiprocessors;
  const size_t room = gpu.shared_bytes_per_block;
  if (room < fixed_bytes) throw KernelError("too little shared memory");
  const size_t slot = tensors * reading.slot_bytes();
  const int steps = (plan.chunk + reading.rows_a_step() - 1) / reading.rows_a_step();
  plan.slots = static_cast<int>(std::min<size_t>((room - fixed_bytes) / slot, steps));
  plan.shared_bytes = static_cast<unsigned>(fixed_bytes + plan.slots * slot);
  return plan;
}

Plan plain_plan(const Reading& reading, const Gpu& gpu, size_t fixed_bytes) {
  const int most = kPlainBlocks * gpu.multiprocessors / reading.slices();
  Plan plan = shared_out(reading, std::max(1, most));
  plan.shared_bytes = static_cast<unsigned>(fixed_bytes);
  return plan;
}

size_t rounded(size_t floats) { return (floats * sizeof(float) + 15) / 16 * 16; }

// Return the size of `Shared` in the kernel sources, forward and backward.
size_t forward_bytes(const Reading& reading) {
  const size_t channels = reading.slice_channels();
  return rounded(kWarps * 2 * channels + 2 * kThreads + kThreads + 3 * channels);
}

size_t backward_bytes(const Reading& reading, int norms) {
  const size_t channels = reading.slice_channels();
  const size_t sums = 1 + norms;
  return rounded(kWarps * sums * channels + sums * kThreads + 3 * norms * channels);
}

at::Tensor row_of(const at::Tensor& like, int64_t count, at::ScalarType kind = at::kFloat) {
  return at::empty({count}, like.options().dtype(kind).memory_format(std::nullopt));
}

const void* read_from(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.const_data_ptr() : nullptr;
}

void* write_to(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.mutable_data_ptr() : nullptr;
}

const float* read_floats(const at::Tensor& tensor) {
  return static_cast<const float*>(read_from(tensor));
}

float* write_floats(const at::Tensor& tensor) { return static_cast<float*>(write_to(tensor)); }

// Kernels of one direction, which differ in the pass they do.
template <size_t N, class Arguments>
struct Passes {
  const KernelFamily<N>& family;
  const char* const function;
  const Reading reading;
  // Compile-time numbers; PASS is set at each launch.
  const std::array<int, N> numbers;
  // Kernel's own bytes of shared memory, number of tensors it keeps in the rest, and number of its sums over
  // rows.
  const size_t bytes;
  const int tensors, sums;
  Arguments arguments{};

  const Kernel& kernel(Pass pass) const {
    auto its_own = numbers;
    its_own[kPassPlace] = pass;
    return family.of(function, its_own);
  }

  void set_rows(const Plan& plan) {
    arguments.rows = reading.rows;
    arguments.channels = reading.channels;
    arguments.blocks = plan.blocks;
    arguments.chunk = plan.chunk;
    arguments.slots = plan.slots;
  }

  void launch(Pass pass, const Plan& plan, int blocks) {
    const Shape shape{
        static_cast<unsigned>(reading.slices()), static_cast<unsigned>(blocks), kThreads,
        plan.shared_bytes, plan.cooperative};
    kernel(pass).launch(shape, arguments);
  }

  // Runs `whole` in one launch if all blocks run at the same time, else the two parts in two launches. If `keeps`,
  // the second part uses all rows again; else it merges only the partial results, in one block per slice.
  void run(const at::Tensor& x, Pass whole, Pass second, bool keeps) {
    const Gpu figures = gpu(x.get_device());
    Plan plan = whole_plan(reading, figures, bytes, tensors);
    if (!keeps) {
      plan.slots = 0;
      plan.shared_bytes = static_cast<unsigned>(bytes);
    }
    // A cooperative plan has at most one block per multiprocessor.
    const bool at_once =
        plan.cooperative && kernel(whole).blocks_at_a_time(kThreads, plan.shared_bytes) > 0;
    if (!at_once) plan = plain_plan(reading, figures, bytes);
    const int64_t blocks = int64_t{plan.blocks} * reading.slices();
    const at::Tensor partials = row_of(x, blocks * sums * reading.slice_channels());
    arguments.partials = write_floats(partials);
    set_rows(plan);
    if (at_once) return launch(whole, plan, plan.blocks);
    launch(kFirstHalf, plan, plan.blocks);
    launch(second, plan, keeps ? plan.blocks : 1);
  }

  // Runs without sums over the rows.
  void run_fixed(const at::Tensor& x) {
    const Plan plan = plain_plan(reading, gpu(x.get_device()), bytes);
    set_rows(plan);
    launch(kFixed, plan, plan.blocks);
  }
};

using Forward = Passes<7, BatchNormForward>;
using Backward = Passes<10, BatchNormBackward>;

Forward forward_of(const Reading& reading, int relu, int residual) {
  return {
      forward_family, "batch_norm_forward", reading,
      forward_numbers(reading, kWhole, relu, residual), forward_bytes(reading), 1, 2};
}

Backward backward_of(const Reading& reading, const BackwardParts& parts) {
  const int norms = 1 + parts.other;
  return {
      backward_family, "batch_norm_backward", reading, backward_numbers(reading, kWhole, parts),
      backward_bytes(reading, norms), 1 + norms, 1 + norms};
}

void set_norm(BatchNormForward& arguments, const BatchNormGiven& norm, const at::Tensor& saved) {
  arguments.x = read_from(norm.x);
  arguments.weight = read_from(norm.weight);
  arguments.bias = read_from(norm.bias);
  arguments.running_mean = write_to(norm.running_mean);
  arguments.running_variance = write_to(norm.running_variance);
  arguments.saved = write_floats(saved);
  arguments.weight_kind = number_kind(norm.weight.defined() ? norm.weight : norm.bias);
  arguments.running_kind = number_kind(norm.running_mean);
  arguments.eps = static_cast<float>(norm.eps);
  arguments.momentum = static_cast<float>(norm.momentum);
}

}  // namespace

BatchNormed batch_norm_forward(const BatchNormGiven& norm, const Addend& addend, bool relu, bool for_backward) {
  const c10::DeviceGuard on(norm.x.device());
  const Reading reading(norm.x, is_aligned(norm.x) && is_aligned(addend.tensor));
  const int residual = !addend.tensor.defined() ? 0 : addend.saved.defined() ? 2 : 1;
  BatchNormed out;
  out.y = at::empty_like(norm.x);
  if (for_backward) out.saved = row_of(norm.x, 4 * int64_t{reading.channels});
  if (for_backward && relu && residual != 0) {
    out.mask = row_of(norm.x, norm.x.numel() / reading.width, at::kByte);
  }
  Forward forward = forward_of(reading, relu, residual);
  set_norm(forward.arguments, norm, out.saved);
  forward.arguments.residual = read_from(addend.tensor);
  forward.arguments.residual_saved = read_floats(addend.saved);
  forward.arguments.y = write_to(out.y);
  forward.arguments.mask = static_cast<unsigned char*>(write_to(out.mask));
  if (norm.training) {
    expect_others(reading, norm.x.get_device());
    forward.run(norm.x, kWhole, kSecondHalf, true);
  } else {
    forward.run_fixed(norm.x);
  }
  return out;
}

at::Tensor batch_norm_statistics(const BatchNormGiven& norm) {
  const c10::DeviceGuard on(norm.x.device());
  const Reading reading(norm.x, is_aligned(norm.x));
  const at::Tensor saved = row_of(norm.x, 4 * int64_t{reading.channels});
  Forward forward = forward_of(reading, 0, 0);
  set_norm(forward.arguments, norm, saved);
  expect_others(reading, norm.x.get_device());
  forward.run(norm.x, kStatistics, kFinish, false);
  return saved;
}

std::tuple<at::Tensor, at::Tensor> batch_norm_moments(const at::Tensor& x) {
  const c10::DeviceGuard on(x.device());
  const Reading reading(x, is_aligned(x));
  const int64_t channels = reading.channels;
  const at::Tensor both = row_of(x, 2 * channels);
  Forward forward = forward_of(reading, 0, 0);
  forward.arguments.x = read_from(x);
  forward.arguments.saved = write_floats(both);
  expect_others(reading, x.get_device());
  forward.run(x, kMoments, kFinishMoments, false);
  return {both.narrow(0, 0, channels), both.narrow(0, channels, channels)};
}

namespace {

at::Tensor like_or_none(const at::Tensor& like) {
  return like.defined() ? at::empty_like(like) : at::Tensor();
}

BatchNormGradients::Of room_for(const BatchNormDone& norm) {
  return {like_or_none(norm.x), like_or_none(norm.weight), like_or_none(norm.bias)};
}

void set_tensors(BatchNormBackward& a, const BatchNormGradient& in, const BatchNormGradients& out) {
  const auto weight_kind = [](const BatchNormDone& norm) {
    return number_kind(norm.weight.defined() ? norm.weight : norm.bias);
  };
  a.x = read_from(in.own.x);
  a.dy = read_from(in.dy);
  a.more_dy = read_from(in.more_dy);
  a.mask = static_cast<const unsigned char*>(read_from(in.mask));
  a.saved = read_floats(in.own.saved);
  a.dx = write_to(out.own.dx);
  a.d_residual = write_to(out.d_residual);
  a.other_x = read_from(in.other.x);
  a.other_saved = read_floats(in.other.saved);
  a.other_dx = write_to(out.other.dx);
  a.d_weight = write_to(out.own.d_weight);
  a.d_bias = write_to(out.own.d_bias);
  a.other_d_weight = write_to(out.other.d_weight);
  a.other_d_bias = write_to(out.other.d_bias);
  a.weight_kind = weight_kind(in.own);
  a.other_weight_kind = weight_kind(in.other);
  a.training = in.training;
}

// Sets the sizes of a pooling, which is for images, not volumes.
void set_pooling(BatchNormBackward& a, const BatchNormGradient& in) {
  a.height = static_cast<int>(in.own.x.size(2));
  a.width = static_cast<int>(in.own.x.size(3));
  a.pooled_height = static_cast<int>(in.dy.size(2));
  a.pooled_width = static_cast<int>(in.dy.size(3));
}

}  // namespace

BatchNormGradients batch_norm_backward(const BatchNormGradient& in) {
  const auto& x = in.own.x;
  const c10::DeviceGuard on(x.device());
  // With a bit mask, the vectors must match the forward's.
  const bool by_bits = in.mask.defined() && !in.pooled;
  const bool aligned = is_aligned(x) && is_aligned(in.dy) && is_aligned(in.more_dy) &&
                       is_aligned(in.other.x);
  const bool single = by_bits && in.mask.numel() == x.numel();
  const Reading reading = in.pooled ? Reading::by_squares(x, aligned && !single)
                                    : Reading(x, aligned && !single);
  if (by_bits && in.mask.numel() * reading.width != x.numel()) {
    throw KernelError("a gradient is not aligned as the input was");
  }
  Backward backward = backward_of(
      reading, {!in.relu ? 0 : by_bits ? 2 : 1, in.more_dy.defined(), in.keeps_residual,
                in.other.x.defined(), in.pooled});
  BatchNormGradients out;
  out.own = room_for(in.own);
  if (in.keeps_residual) out.d_residual = at::empty_like(x);
  out.other = room_for(in.other);
  set_tensors(backward.arguments, in, out);
  backward.arguments.count = static_cast<int>(x.numel() / reading.channels);
  if (in.pooled) set_pooling(backward.arguments, in);
  const bool sums = in.training || in.own.weight.defined() || in.own.bias.defined() ||
                    in.other.weight.defined() || in.other.bias.defined();
  sums ? backward.run(x, kWhole, kSecondHalf, true) : backward.run_fixed(x);
  return out;
}

BatchNormed batch_norm_pool(const at::Tensor& x, const at::Tensor& saved) {
  const c10::DeviceGuard on(x.device());
  // The backward will use the same access pattern.
  const Reading reading = Reading::by_squares(x, is_aligned(x));
  const auto pooled = [](int64_t size) { return (size - 1) / 2 + 1; };
  BatchNormed out;
  out.y = at::empty(
      {x.size(0), x.size(1), pooled(x.size(2)), pooled(x.size(3))},
      x.options().memory_format(at::MemoryFormat::ChannelsLast));
  out.saved = saved;
  out.mask = row_of(x, out.y.numel(), at::kByte);
  BatchNormPool arguments{};
  arguments.x = read_from(x);
  arguments.saved = read_floats(saved);
  arguments.y = write_to(out.y);
  arguments.place = static_cast<unsigned char*>(write_to(out.mask));
  arguments.total = static_cast<int>(out.y.numel() / reading.width);
  arguments.channels = reading.channels;
  arguments.height = static_cast<int>(x.size(2));
  arguments.width = static_cast<int>(x.size(3));
  arguments.pooled_height = static_cast<int>(out.y.size(2));
  arguments.pooled_width = static_cast<int>(out.y.size(3));
  constexpr unsigned kPoolThreads = 256;
  const unsigned blocks = (arguments.total + kPoolThreads - 1) / kPoolThreads;
  pool_family.of("batch_norm_pool", pool_numbers(reading))
      .launch(Shape{blocks, 1, kPoolThreads, 0, false}, arguments);
  return out;
}

}  // namespace brimful::kernels
