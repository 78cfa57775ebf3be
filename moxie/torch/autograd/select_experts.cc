// The autograd node of select_experts. It saves logits and ids; backward computes the scores again.
#include "moxie/torch/ops/select_experts.h"

#include <torch/library.h>

#include "moxie/torch/autograd/node.h"

namespace moxie::ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct SelectExperts : torch::autograd::Function<SelectExperts> {
  static variable_list forward(AutogradContext* ctx, const Tensor& logits,
                               const OptionalTensor& bias, int64_t k,
                               const SelectExpertsOptions& options) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const auto [weights, ids, counts] = ops::select_experts(logits, bias, k, options);
    ctx->save_for_backward({logits, ids});
    ctx->mark_non_differentiable({ids, counts});
    ctx->set_materialize_grads(false);  // or torch makes zeros for both in every backward
    ctx->saved_data["sigmoid"] = options.sigmoid;
    ctx->saved_data["normalize"] = options.normalize;
    ctx->saved_data["scale"] = options.scale;
    return {weights, ids, counts};
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    variable_list out(4);
    const Tensor& dweights = grads[0];
    if (!dweights.defined()) return out;
    const auto saved = saved_for_backward(ctx, "select_experts");
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    auto& data = ctx->saved_data;
    out[0] = ops::select_experts_backward(dweights, saved[0], saved[1], data["sigmoid"].toBool(),
                                          data["normalize"].toBool(), data["scale"].toDouble());
    return out;
  }
};

std::tuple<Tensor, Tensor, Tensor> select_experts_autograd(const Tensor& logits,
                                                           const OptionalTensor& bias, int64_t k,
                                                           bool sigmoid, bool normalize,
                                                           double scale) {
  const SelectExpertsOptions options{.sigmoid = sigmoid, .normalize = normalize, .scale = scale};
  if (logits.scalar_type() != at::kDouble) {
    const auto out = SelectExperts::apply(logits, bias, k, options);
    return {out[0], out[1], out[2]};
  }
  const auto [weights, ids, counts] = [&] {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    return ops::select_experts(logits, bias, k, options);
  }();
  return {composite_weights(logits, ids, weighting_of(sigmoid, normalize, scale)), ids, counts};
}

}  // namespace

TORCH_LIBRARY_IMPL(moxie, Autograd, m) {
  m.impl("_select_experts", TORCH_FN(select_experts_autograd));
}

}  // namespace moxie::ops
