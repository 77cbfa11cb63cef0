// Embedding lookup on a GPU. Its gradient goes directly into the sum offered for it, which saves a table of zeros
// and a pass over the whole table.

#include "guard.h"
#include "kernel_node.h"
#include "kernel_tensors.h"
#include "offered_sums.h"

#include <ATen/ops/embedding.h>
#include <ATen/ops/embedding_dense_backward.h>
#include <ATen/ops/index_put.h>

using namespace brimful::kernels;

namespace {

struct EmbeddingNode final : KernelNode {
  std::string name() const override { return "BrimfulEmbeddingBackward"; }
  const char* what() const override { return "an embedding"; }
  bool is_splittable() const override { return true; }

  void let_go() override {
    table.reset_data();
    places.reset_data();
  }

  variable_list backward(variable_list&& gradients) override {
    variable_list out(num_outputs());
    const auto& gradient = gradients[0];
    if (!gradient.defined() || !task_should_compute_output(0)) return out;
    const auto rows = table.unpack();
    const auto index = places.unpack();
    auto* sum = brimful::offered_sum(rows);
    // A sum that does not exist yet would have to be filled with zeros first, which saves nothing.
    if (sum == nullptr || !sum->defined()) {
      out[0] = at::embedding_dense_backward(gradient, index, rows.size(0), -1, false);
      return out;
    }
    // Sorts the indices first, so that rows are added in a fixed order.
    const c10::List<std::optional<at::Tensor>> at({index.reshape({-1})});
    const auto added = gradient.reshape({-1, rows.size(1)}).to(sum->scalar_type());
    at::index_put_(*sum, at, added, /*accumulate=*/true);
    return out;
  }

  SavedVariable table, places;
};

at::Tensor looked_up(const at::Tensor& table, const at::Tensor& places) {
  const bool is_ours = takes(table) && places.numel() > 0;
  if (!is_ours || !compute_requires_grad(table)) return at::embedding(table, places);
  const auto node = node_after<EmbeddingNode>(table);
  node->table = SavedVariable(table, false);
  node->places = SavedVariable(places, false);
  return with_history(node, [&] { return at::embedding(table, places); });
}

}  // namespace

extern "C" {

int32_t brimful_embedding(
    const at::Tensor* table, const at::Tensor* places, at::Tensor** out, char** message) noexcept {
  return brimful::guarded(message, [&] { *out = new at::Tensor(looked_up(*table, *places)); });
}

}  // extern "C"
