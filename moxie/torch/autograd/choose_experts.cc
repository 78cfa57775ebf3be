// choose_experts: gate_logits and select_experts as one node, for routers that need the logits for
// nothing else. Its passes are the ops of the two, so every result is theirs.
#include <torch/library.h>

#include "moxie/torch/autograd/node.h"

namespace moxie::ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

using Choice = std::tuple<Tensor, Tensor, Tensor>;  // weights, ids, counts

// The arguments of choose_experts that get no gradient.
struct How {
  const OptionalTensor& bias;
  int64_t k;
  const SelectExpertsOptions& options;
};

enum Saved : size_t { kX, kWeight, kLogits, kIds };

struct ChooseExperts : torch::autograd::Function<ChooseExperts> {
  static variable_list forward(AutogradContext* ctx, const Tensor& x, const Tensor& weight,
                               const How& how) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const Tensor logits = ops::gate_logits(x, weight);
    const auto [weights, ids, counts] = ops::select_experts(logits, how.bias, how.k, how.options);
    ctx->save_for_backward({weight.requires_grad() ? x : Tensor(), weight, logits, ids});
    ctx->mark_non_differentiable({ids, counts});
    ctx->set_materialize_grads(false);  // or torch makes zeros for both in every backward
    ctx->saved_data["dtype"] = x.scalar_type();
    ctx->saved_data["sigmoid"] = how.options.sigmoid;
    ctx->saved_data["normalize"] = how.options.normalize;
    ctx->saved_data["scale"] = how.options.scale;
    return {weights, ids, counts};
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    variable_list out(3);
    const Tensor& dweights = grads[0];
    if (!dweights.defined()) return out;
    const auto saved = saved_for_backward(ctx, "choose_experts");
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    auto& data = ctx->saved_data;
    const Tensor dlogits = ops::select_experts_backward(
        dweights, saved[kLogits], saved[kIds], data["sigmoid"].toBool(), data["normalize"].toBool(),
        data["scale"].toDouble());
    const bool needs_dx = ctx->needs_input_grad(0), needs_dweight = ctx->needs_input_grad(1);
    const auto x = needs_dweight ? OptionalTensor(saved[kX]) : std::nullopt;
    const auto dtype = needs_dx ? std::optional(data["dtype"].toScalarType()) : std::nullopt;
    const auto made = ops::gate_logits_backward(dlogits, saved[kWeight], x, dtype);
    if (needs_dx) out[0] = made.front();
    if (needs_dweight) out[1] = made.back();
    return out;
  }
};

Choice choose_experts_kernel(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                             int64_t k, bool sigmoid, bool normalize, double scale) {
  return ops::select_experts(ops::gate_logits(x, weight), bias, k,
                             {.sigmoid = sigmoid, .normalize = normalize, .scale = scale});
}

Choice choose_experts_autograd(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                               int64_t k, bool sigmoid, bool normalize, double scale) {
  // f64 is for gradcheck; the node of select_experts has no f64.
  if (x.scalar_type() == at::kDouble)
    return choose_experts_kernel(x, weight, bias, k, sigmoid, normalize, scale);
  const SelectExpertsOptions options{.sigmoid = sigmoid, .normalize = normalize, .scale = scale};
  const auto out = ChooseExperts::apply(x, weight, How{bias, k, options});
  return {out[0], out[1], out[2]};
}

}  // namespace

TORCH_LIBRARY_IMPL(moxie, Autograd, m) {
  m.impl("_choose_experts", TORCH_FN(choose_experts_autograd));
}
TORCH_LIBRARY_IMPL(moxie, CompositeExplicitAutograd, m) {
  m.impl("_choose_experts", TORCH_FN(choose_experts_kernel));
}

}  // namespace moxie::ops
