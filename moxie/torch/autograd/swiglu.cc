#include <torch/library.h>

#include "moxie/torch/autograd/node.h"

namespace moxie::ops {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct Swiglu : torch::autograd::Function<Swiglu> {
  static Tensor forward(AutogradContext* ctx, const Tensor& h, std::string_view activation) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    ctx->save_for_backward({h});
    ctx->saved_data["activation"] = std::string(activation);
    return ops::swiglu(h, activation);
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    if (!grads[0].defined()) return {Tensor(), Tensor()};
    const Tensor h = saved_for_backward(ctx, "swiglu")[0];
    const std::string& activation = ctx->saved_data["activation"].toStringRef();
    return {ops::swiglu_backward(grads[0].to(h.scalar_type()), h, activation), Tensor()};
  }
};

Tensor swiglu_autograd(const Tensor& h, std::string_view activation) {
  return Swiglu::apply(h, activation);
}

}  // namespace

TORCH_LIBRARY_IMPL(moxie, Autograd, m) { m.impl("swiglu", TORCH_FN(swiglu_autograd)); }

}  // namespace moxie::ops
