// Linear layers on a GPU with the same input rows, whose weight gradients go directly into the offered sums.
//
//   x [rows × inputs] · weight + bias ──▶ out [rows × outputs], of each layer: apart, or all of a row side by side
//
//   backward   gradient · weight ──▶ gradient of x, added up over the layers
//              gradient · x      ──▶ added to the offered f32 sum, or returned as the weight's gradient
//              sums of columns   ──▶ gradient of the bias

#include "column_sums.h"
#include "guard.h"
#include "kernel_node.h"
#include "kernel_tensors.h"
#include "offered_sums.h"
#include "tensors.h"

#include <ATen/autocast_mode.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>

#include <algorithm>
#include <vector>

using namespace brimful::kernels;

namespace {

// Throws a KernelError if the kernel is not available.
at::Tensor of_bias_by_kernel(const at::Tensor& given, const at::Tensor& bias) {
  const OwnWork own(given);
  const auto matrix = laid_out(given);
  const auto kind = number_kind(matrix);
  const auto rows = matrix.size(0), columns = matrix.size(1);
  const auto blocks = functions()->column_partial_rows(rows, columns, kind);
  const auto partials = at::empty({blocks, columns}, matrix.options().dtype(at::kFloat));
  ColumnPartialsArguments arguments{};
  arguments.from = matrix.const_data_ptr();
  arguments.into = partials.mutable_data_ptr<float>();
  arguments.rows = rows;
  arguments.columns = static_cast<int>(columns);
  functions()->column_partials(arguments, kind);
  at::Tensor of_bias;
  sum_columns({{partials, bias, of_bias}});
  return of_bias;
}

// Returns the bias's gradient; undefined if its partial sums are deferred.
at::Tensor of_bias(const at::Tensor& gradient, const at::Tensor& bias) {
  return or_else(
      "a bias's gradient", [&] { return of_bias_by_kernel(gradient, bias); },
      [&] { return gradient.sum(0); });
}

// Weight (outputs × inputs, or inputs × outputs) and bias of a layer.
struct Layer {
  at::Tensor weight;
  at::Tensor bias;  // undefined if there is none
};

int64_t outputs_of(const at::Tensor& weight, bool inputs_first) {
  return weight.size(inputs_first ? 1 : 0);
}

struct ProjectionsNode final : KernelNode {
  struct Saved {
    SavedVariable weight, bias;
    int64_t outputs;
  };

  std::string name() const override { return "BrimfulProjectionsBackward"; }
  const char* what() const override { return "a projection"; }
  bool is_splittable() const override { return true; }

  // Edge 0 is x's; each layer's weight and bias follow.
  static size_t weight_edge(size_t layer) { return 1 + 2 * layer; }
  static size_t bias_edge(size_t layer) { return 2 + 2 * layer; }

  void let_go() override {
    x.reset_data();
    for (auto& layer : layers) {
      layer.weight.reset_data();
      layer.bias.reset_data();
    }
  }

  variable_list backward(variable_list&& gradients) override {
    variable_list out(num_outputs());
    int64_t at = 0;
    for (size_t i = 0; i < layers.size(); ++i) {
      const auto outputs = layers[i].outputs;
      const auto& all = gradients[joined ? 0 : i];
      const auto gradient = joined && all.defined() ? all.narrow(1, at, outputs) : all;
      at += outputs;
      if (gradient.defined()) one_backward(i, gradient, out);
    }
    return out;
  }

  void one_backward(size_t i, const at::Tensor& gradient, variable_list& out) {
    const auto weight = layers[i].weight.unpack();
    if (task_should_compute_output(0)) {
      const auto by = inputs_first ? weight.t() : weight;
      if (out[0].defined()) {
        at::addmm_out(out[0], out[0], gradient, by);
      } else {
        out[0] = at::mm(gradient, by);
      }
    }
    if (task_should_compute_output(weight_edge(i))) {
      out[weight_edge(i)] = of_weight(gradient, weight);
    }
    if (task_should_compute_output(bias_edge(i))) {
      out[bias_edge(i)] = of_bias(gradient, layers[i].bias.unpack());
    }
  }

  // Returns the weight's gradient; undefined if it was added to the offered sum.
  at::Tensor of_weight(const at::Tensor& gradient, const at::Tensor& weight) {
    const auto rows = x.unpack();
    const auto a = inputs_first ? rows.t() : gradient.t();
    const auto& b = inputs_first ? gradient : rows;
    auto* sum = brimful::offered_sum(weight);
    if (sum == nullptr) return at::mm(a, b);
    brimful::add_product(*sum, a, b);
    return {};
  }

  SavedVariable x;
  std::vector<Saved> layers;
  bool inputs_first = false;
  bool joined = false;
};

// Several layers applied to the same rows.
struct Projections {
  const at::Tensor& x;
  const std::vector<Layer>& layers;
  bool inputs_first;
  bool joined;

  std::vector<at::Tensor> run() const {
    if (!is_ours()) return joined ? std::vector<at::Tensor>{at::cat(each(), 1)} : each();
    if (!wants_gradient()) return computed();
    return with_history(made_node(), [&] { return computed(); });
  }

 private:
  bool wants_gradient() const {
    return compute_requires_grad(x) ||
           std::any_of(layers.begin(), layers.end(), [](const Layer& layer) {
             return compute_requires_grad(layer.weight, layer.bias);
           });
  }

  // With the kernels switched off, or under autocast, libtorch's own layers run.
  bool is_ours() const {
    const auto fits = [&](const Layer& layer) {
      return is_alike(x, layer.weight) && is_alike(x, layer.bias);
    };
    return takes(x) && x.numel() > 0 && !at::autocast::is_autocast_enabled(at::kCUDA) &&
           std::all_of(layers.begin(), layers.end(), fits);
  }

  std::shared_ptr<ProjectionsNode> made_node() const {
    std::vector<at::Tensor> leaves;
    for (const auto& [weight, bias] : layers) leaves.insert(leaves.end(), {weight, bias});
    const auto node = node_after<ProjectionsNode>(x, at::ArrayRef<at::Tensor>(leaves));
    node->x = SavedVariable(x, false);
    node->inputs_first = inputs_first;
    node->joined = joined;
    for (const auto& [weight, bias] : layers) {
      const auto outputs = outputs_of(weight, inputs_first);
      node->layers.push_back({SavedVariable(weight, false), SavedVariable(bias, false), outputs});
    }
    return node;
  }

  at::Tensor product(const Layer& layer) const {
    // One kernel for the product and the bias.
    if (!inputs_first) return at::linear(x, layer.weight, layer.bias);
    return layer.bias.defined() ? at::addmm(layer.bias, x, layer.weight) : at::mm(x, layer.weight);
  }

  std::vector<at::Tensor> each() const {
    std::vector<at::Tensor> out;
    for (const auto& layer : layers) out.push_back(product(layer));
    return out;
  }

  std::vector<at::Tensor> computed() const { return joined ? side_by_side() : each(); }

  // Writes each product directly into its columns.
  std::vector<at::Tensor> side_by_side() const {
    int64_t all = 0, at = 0;
    for (const auto& layer : layers) all += outputs_of(layer.weight, inputs_first);
    auto out = at::empty({x.size(0), all}, x.options());
    for (const auto& layer : layers) {
      const auto outputs = outputs_of(layer.weight, inputs_first);
      auto into = out.narrow(1, at, outputs);
      const auto by = inputs_first ? layer.weight : layer.weight.t();
      if (layer.bias.defined()) {
        at::addmm_out(into, layer.bias, x, by);
      } else {
        at::mm_out(into, x, by);
      }
      at += outputs;
    }
    return {out};
  }
};

}  // namespace

extern "C" {

// Maps rows × inputs to rows × outputs of each layer, or of all layers joined; a null bias means none.
int32_t brimful_projections(
    const at::Tensor* x, const at::Tensor* const* weights, const at::Tensor* const* biases,
    size_t count, bool inputs_first, bool joined, at::Tensor** out, char** message) noexcept {
  return brimful::guarded(message, [&] {
    std::vector<Layer> layers;
    for (size_t i = 0; i < count; ++i) layers.push_back({*weights[i], brimful::or_none(biases[i])});
    const auto all = Projections{*x, layers, inputs_first, joined}.run();
    for (size_t i = 0; i < all.size(); ++i) out[i] = new at::Tensor(all[i]);
  });
}

}  // extern "C"
