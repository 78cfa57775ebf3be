#include "moxie/torch/nn/moe.h"

#include <ATen/ops/zeros.h>

#include "moxie/torch/ops.h"

namespace moxie::nn {

MoeImpl::MoeImpl(const MoeOptions& options) {
  router = register_module("router", Router(options.router));
  ExpertsOptions of_experts{.dim = options.router.dim,
                            .hidden_dim = options.hidden_dim,
                            .num_experts = options.router.num_experts,
                            .recipe = options.recipe,
                            .weight_cache = options.weight_cache,
                            .collect_stats = options.collect_stats,
                            .keep = options.keep,
                            .activation = options.activation,
                            .bias = options.bias,
                            .w13_layout = options.w13_layout,
                            .transposed = options.transposed,
                            .tensor = options.router.tensor};
  experts = register_module("experts", GroupedExperts(of_experts));
  if (options.shared_hidden_dim > 0) {
    of_experts.hidden_dim = options.shared_hidden_dim;
    shared = register_module("shared", SharedExperts(of_experts));
  }
  loss = at::zeros({});
}

void MoeImpl::refresh() {
  experts->refresh();
  if (shared) shared->experts->refresh();
}

at::Tensor MoeImpl::forward(const at::Tensor& x) {
  const at::Tensor tokens = x.reshape({-1, x.size(-1)});
  const Routing routing = router(tokens);
  loss = routing.loss;
  const RouterOptions& options = router->options();
  const auto [offs, slot_of, row_of] = ops::route(routing.ids, options.num_experts);
  at::Tensor y =
      experts(tokens, std::optional(offs), ops::Permutation{slot_of, row_of, options.top_k},
              std::optional(routing.weights));
  if (shared) y = y + shared(tokens);
  return y.reshape(x.sizes());
}

}  // namespace moxie::nn
