// The autograd node of gate_logits. It saves x in its own dtype: an f32 copy of bf16 x would take
// twice the memory.
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
    if (!grads[0].defined()) return out;
    const auto saved = saved_for_backward(ctx, "gate_logits");
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const bool needs_dx = ctx->needs_input_grad(0), needs_dweight = ctx->needs_input_grad(1);
    const auto x = needs_dweight ? OptionalTensor(saved[0]) : std::nullopt;
    const auto dtype =
        needs_dx ? std::optional(ctx->saved_data["dtype"].toScalarType()) : std::nullopt;
    const auto made = ops::gate_logits_backward(grads[0], saved[1], x, dtype);
    if (needs_dx) out[0] = made.front();
    if (needs_dweight) out[1] = made.back();
    return out;
  }
};

Tensor gate_logits_autograd(const Tensor& x, const Tensor& weight) {
  return GateLogits::apply(x, weight);
}

}  // namespace

TORCH_LIBRARY_IMPL(moxie, Autograd, m) { m.impl("gate_logits", TORCH_FN(gate_logits_autograd)); }

}  // namespace moxie::ops
