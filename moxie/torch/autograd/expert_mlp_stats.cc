#include <ATen/ops/cat.h>
#include <ATen/ops/stack.h>

#include "moxie/torch/autograd/expert_mlp.h"
#include "moxie/torch/autograd/operand_stats.h"
#include "moxie/torch/stats.h"

namespace moxie::ops::mlp {
namespace {

Tensor rows_of(const Tensor& tokens, const Permutation& permutation) {
  const auto& [slot_of, row_of, top_k] = permutation;
  return slot_of ? permute(tokens, *slot_of, *row_of, top_k) : tokens;
}

}  // namespace

void add_forward_stats(const Tensor& stats, const ForwardOperands& of, const Call& call) {
  const ExpertMlpOptions& options = call.options;
  const Tensor x = rows_of(of.x, call.permutation());
  const Tensor a = RowActivation{call.activation}.forward(of.h);
  const Tensor a_t =
      options.weights
          ? RowActivation{call.activation, options.weights, options.slot_of}.forward(of.h)
          : a;
  const auto of_product = [&](const ForwardParts& parts) {
    const Tensor forward = stats_of_forward(parts, options.offs, options.recipe);
    return at::cat({forward, forward.new_zeros({kNumStatsParts - kForwardParts, kNumStats})});
  };
  // Adds both products' statistics in one call: of two custom ops that write views of one tensor,
  // inductor loses the first.
  add_once_(stats, at::stack({of_product({x, x, of.w13}), of_product({a, a_t, of.w2})}));
}

void add_backward_stats(const Tensor& stats, const BackwardOperands& of) {
  const auto add = [&](int64_t product, const Tensor& dy) {
    stats[product]
        .narrow(0, kForwardParts, kNumStatsParts - kForwardParts)
        .add_(stats_of_gradient(dy, of.offs, of.recipe));
  };
  add(1, rows_of(of.dy, of.permutation));
  if (of.da.defined()) add(0, std::get<0>(of.glu.backward(of.da, of.h)));
}

}  // namespace moxie::ops::mlp
