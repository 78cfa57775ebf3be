// gate_logits keeps x as it is for backward, not its f32 copy, which is twice as large.
#include <torch/library.h>

#include "moxie/torch/autograd/node.h"

namespace moxie::ops {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct GateLogits : torch::autograd::Function<GateLogits> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& weight) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    ctx->save_for_backward({weight.requires_grad() ? x : Tensor(), weight});
    ctx->saved_data["dtype"] = x.scalar_type();
    return ops::gate_logits(x, weight);
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    variable_list out(2);
    const Tensor& dlogits = grads[0];
    if (!dlogits.defined()) return out;
    const auto saved = saved_for_backward(ctx, "gate_logits");
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    const auto wide = dlogits.scalar_type();
    const Tensor& weight = saved[1];
    if (ctx->needs_input_grad(0))
      out[0] = dlogits.matmul(weight.to(wide)).to(ctx->saved_data["dtype"].toScalarType());
    if (ctx->needs_input_grad(1))
      out[1] = dlogits.t().matmul(saved[0].to(wide)).to(weight.scalar_type());
    return out;
  }
};

Tensor gate_logits_autograd(const Tensor& x, const Tensor& weight) {
  return GateLogits::apply(x, weight);
}

}  // namespace

TORCH_LIBRARY_IMPL(moxie, Autograd, m) { m.impl("gate_logits", TORCH_FN(gate_logits_autograd)); }

}  // namespace moxie::ops
