// choose_experts: gate_logits and select_experts as one node, for routers that need the logits for
// nothing else. Its passes are the ops of the two, so every result is theirs. choose_experts_once
// returns x as well: what uses that in place of x gets its gradient added to the router's by this
// node, which costs the host less than the addition by autograd.
#include <ATen/ops/alias.h>
#include <torch/library.h>

#include "moxie/torch/autograd/node.h"

namespace moxie::ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

using Choice = std::tuple<Tensor, Tensor, Tensor>;  // weights, ids, and counts or x

// The arguments that get no gradient.
struct How {
  const OptionalTensor& bias;
  int64_t k;
  const SelectExpertsOptions& options;
};

enum Saved : size_t { kX, kWeight, kLogits, kIds };

void save(AutogradContext* ctx, const Tensor& x, const Tensor& weight, const Tensor& logits,
          const Tensor& ids, const SelectExpertsOptions& options) {
  ctx->save_for_backward({weight.requires_grad() ? x : Tensor(), weight, logits, ids});
  ctx->set_materialize_grads(false);  // or torch makes zeros for what needs no gradient
  ctx->saved_data["dtype"] = x.scalar_type();
  ctx->saved_data["sigmoid"] = options.sigmoid;
  ctx->saved_data["normalize"] = options.normalize;
  ctx->saved_data["scale"] = options.scale;
}

// The gradients of x and the weight. dx_of_others: the gradient of the returned x, or undefined.
variable_list gradients(AutogradContext* ctx, const Tensor& dweights, const Tensor& dx_of_others) {
  variable_list out(3);
  if (!dweights.defined()) {
    out[0] = dx_of_others;
    return out;
  }
  const auto saved = saved_for_backward(ctx, "choose_experts");
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  auto& data = ctx->saved_data;
  const Tensor dlogits =
      ops::select_experts_backward(dweights, saved[kLogits], saved[kIds], data["sigmoid"].toBool(),
                                   data["normalize"].toBool(), data["scale"].toDouble());
  const bool needs_dx = ctx->needs_input_grad(0), needs_dweight = ctx->needs_input_grad(1);
  const auto x = needs_dweight ? OptionalTensor(saved[kX]) : std::nullopt;
  const auto dtype = needs_dx ? std::optional(data["dtype"].toScalarType()) : std::nullopt;
  const auto add = needs_dx && dx_of_others.defined() ? OptionalTensor(dx_of_others) : std::nullopt;
  const auto made = ops::gate_logits_backward(dlogits, saved[kWeight], x, dtype, add);
  if (needs_dx) out[0] = made.front();
  if (needs_dweight) out[1] = made.back();
  return out;
}

struct ChooseExperts : torch::autograd::Function<ChooseExperts> {
  static variable_list forward(AutogradContext* ctx, const Tensor& x, const Tensor& weight,
                               const How& how) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const Tensor logits = ops::gate_logits(x, weight);
    const auto [weights, ids, counts] = ops::select_experts(logits, how.bias, how.k, how.options);
    save(ctx, x, weight, logits, ids, how.options);
    ctx->mark_non_differentiable({ids, counts});
    return {weights, ids, counts};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    return gradients(ctx, grads[0], {});
  }
};

struct ChooseExpertsOnce : torch::autograd::Function<ChooseExpertsOnce> {
  static variable_list forward(AutogradContext* ctx, const Tensor& x, const Tensor& weight,
                               const How& how, const OptionalTensor* load) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const auto& options = how.options;
    const Tensor logits = ops::gate_logits(x, weight);
    const auto [weights, ids] = ops::select_experts_once(logits, how.bias, how.k, options.sigmoid,
                                                         options.normalize, options.scale, *load);
    save(ctx, x, weight, logits, ids, options);
    ctx->mark_non_differentiable({ids});
    return {weights, ids, x};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    variable_list out = gradients(ctx, grads[0], grads[2]);
    out.resize(4);
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

Choice choose_experts_once_kernel(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                                  int64_t k, bool sigmoid, bool normalize, double scale,
                                  const OptionalTensor& load) {
  if (x.scalar_type() == at::kDouble) {
    const auto [weights, ids, counts] =
        choose_experts_kernel(x, weight, bias, k, sigmoid, normalize, scale);
    if (load) ops::add_once_(*load, counts);
    return {weights, ids, at::alias(x)};
  }
  const auto [weights, ids] = ops::select_experts_once(ops::gate_logits(x, weight), bias, k,
                                                       sigmoid, normalize, scale, load);
  return {weights, ids, at::alias(x)};
}

Choice choose_experts_once_autograd(const Tensor& x, const Tensor& weight,
                                    const OptionalTensor& bias, int64_t k, bool sigmoid,
                                    bool normalize, double scale, const OptionalTensor& load) {
  if (x.scalar_type() == at::kDouble)
    return choose_experts_once_kernel(x, weight, bias, k, sigmoid, normalize, scale, load);
  const SelectExpertsOptions options{.sigmoid = sigmoid, .normalize = normalize, .scale = scale};
  const auto out = ChooseExpertsOnce::apply(x, weight, How{bias, k, options}, &load);
  return {out[0], out[1], out[2]};
}

}  // namespace

TORCH_LIBRARY_IMPL(moxie, Autograd, m) {
  m.impl("_choose_experts", TORCH_FN(choose_experts_autograd));
  m.impl("_choose_experts_once", TORCH_FN(choose_experts_once_autograd));
}
TORCH_LIBRARY_IMPL(moxie, CompositeExplicitAutograd, m) {
  m.impl("_choose_experts", TORCH_FN(choose_experts_kernel));
  m.impl("_choose_experts_once", TORCH_FN(choose_experts_once_kernel));
}

}  // namespace moxie::ops
