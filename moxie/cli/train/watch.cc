#include "moxie/cli/train/watch.h"

#include <ATen/ops/isfinite.h>

#include <algorithm>
#include <optional>

#include "moxie/torch/ops.h"

namespace moxie::cli {
namespace {

bool all_finite(const at::Tensor& x) { return at::isfinite(x).all().item<bool>(); }

// The first index of dim 0 at which a value is not finite; absent if all are finite.
std::optional<int64_t> first_not_finite(const at::Tensor& x) {
  const at::Tensor bad = at::isfinite(x).logical_not().flatten(1).any(1).nonzero();
  if (bad.numel() == 0) return std::nullopt;
  return bad[0].item<int64_t>();
}

// Says which expert's matrix is the first that is not finite, as in ", first in expert 5"; empty
// for a tensor without experts.
std::string expert_of_weight(const at::Tensor& weight) {
  if (weight.dim() != 3 || weight.size(0) == 1) return "";
  return ", first in expert " + std::to_string(first_not_finite(weight).value());
}

std::string expert_of_rows(nn::MoeImpl& moe, const at::Tensor& x) {
  const at::Tensor tokens = x.reshape({-1, x.size(-1)});
  const nn::RouterOptions& options = moe.router->options();
  const auto [offs, slot_of, row_of] = ops::route(moe.router(tokens).ids, options.num_experts);
  const at::Tensor rows =
      moe.experts(ops::permute(tokens, slot_of, row_of, options.top_k), std::optional(offs));
  const std::optional<int64_t> row = first_not_finite(rows);
  if (!row) return ", though none of its experts' are";
  const at::Tensor ends = offs.cpu();
  const int32_t* first = ends.const_data_ptr<int32_t>();
  const auto expert = std::upper_bound(first, first + ends.numel(), *row) - first;
  return ", first in expert " + std::to_string(expert);
}

std::string find_in_forward(LanguageModelImpl& model, const at::Tensor& windows) {
  std::string found;
  const auto tap = [&](const std::string& name, const at::Tensor& in, const at::Tensor& out) {
    if (!found.empty() || all_finite(out)) return;
    found = "the output of " + name + " is not finite";
    model.each_moe([&](const std::string& moe_name, nn::MoeImpl& moe) {
      if (moe_name == name) found += expert_of_rows(moe, in);
    });
  };
  model.eval();  // so that the routers do not count these tokens
  model.forward(windows, tap);
  model.train();
  return found;
}

// Finds the first gradient that is not finite in the order of backward, from the head to the
// embedding: from its origin it spreads to everything that comes later.
std::string find_in_gradients(const std::vector<Weight>& weights) {
  std::vector<const Weight*> order;
  for (auto weight = weights.rbegin(); weight != weights.rend(); ++weight)
    order.push_back(&*weight);
  std::stable_partition(order.begin(), order.end(),
                        [](auto* weight) { return weight->name == "head"; });
  for (const Weight* weight : order)
    if (!all_finite(weight->grad))
      return "the gradient of " + weight->name + " is not finite" + expert_of_weight(weight->grad);
  return "";
}

}  // namespace

std::string find_not_finite(LanguageModelImpl& model, const AdamW& optimizer,
                            const at::Tensor& windows) {
  const at::NoGradGuard no_grad;
  for (const Weight& weight : optimizer.weights())
    if (!all_finite(weight.master))
      return "the weight " + weight.name + " is not finite" + expert_of_weight(weight.master);
  if (const std::string found = find_in_forward(model, windows); !found.empty()) return found;
  if (const std::string found = find_in_gradients(optimizer.weights()); !found.empty())
    return found;
  return "every weight, output and gradient is finite, but their norm or the loss overflows";
}

}  // namespace moxie::cli
