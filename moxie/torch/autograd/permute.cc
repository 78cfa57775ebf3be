// The autograd nodes of permute and unpermute. permute copies rows, so its gradient sums them.
// unpermute's gradient copies rows back, times the weights; the gradient of its weights is one dot
// product per slot. Indices have no gradient, nor have the weights of permute.
#include <torch/library.h>

#include "moxie/torch/autograd/node.h"

namespace moxie::ops {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<at::Tensor>;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct Permute : torch::autograd::Function<Permute> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& slot_of,
                        const Tensor& row_of, int64_t top_k, const OptionalTensor& weights) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    ctx->save_for_backward({slot_of, row_of, weights.value_or(Tensor())});
    ctx->saved_data["num_tokens"] = x.sym_size(0);
    return ops::permute(x, slot_of, row_of, top_k, weights);
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    variable_list out(5);
    if (!grads[0].defined()) return out;
    const auto saved = saved_for_backward(ctx, "permute");
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const auto weights = saved[2].defined() ? OptionalTensor(saved[2]) : std::nullopt;
    out[0] = ops::unpermute(grads[0], saved[0], saved[1], ctx->saved_data["num_tokens"].toSymInt(),
                            weights);
    return out;
  }
};

struct Unpermute : torch::autograd::Function<Unpermute> {
  static Tensor forward(AutogradContext* ctx, const Tensor& rows, const Tensor& slot_of,
                        const Tensor& row_of, const c10::SymInt& num_tokens,
                        const OptionalTensor& weights) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    // rows are saved only if the weights need a gradient, which is computed from them.
    const bool keep = weights && weights->requires_grad();
    ctx->save_for_backward({slot_of, row_of, weights.value_or(Tensor()), keep ? rows : Tensor()});
    ctx->saved_data["num_rows"] = rows.sym_size(0);
    ctx->saved_data["dtype"] = rows.scalar_type();
    return ops::unpermute(rows, slot_of, row_of, num_tokens, weights);
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    variable_list out(5);
    if (!grads[0].defined()) return out;
    const auto saved = saved_for_backward(ctx, "unpermute");
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const auto weights = saved[2].defined() ? OptionalTensor(saved[2]) : std::nullopt;
    const Tensor dx = grads[0].to(ctx->saved_data["dtype"].toScalarType());
    const c10::SymInt tokens = dx.sym_size(0);
    // Without weights, top_k follows from the numbers of rows and tokens.
    const int64_t top_k = weights ? weights->sym_size(1).guard_int(__FILE__, __LINE__)
                                  : (ctx->saved_data["num_rows"].toSymInt() / tokens.max(1))
                                        .guard_int(__FILE__, __LINE__);
    if (ctx->needs_input_grad(0)) {
      if (top_k == 0)  // no tokens, so no rows
        out[0] = dx.new_zeros_symint({ctx->saved_data["num_rows"].toSymInt(), dx.sym_size(1)});
      else
        out[0] = ops::permute(dx, saved[0], saved[1], top_k, weights);
    }
    if (weights && saved[3].defined() && ctx->needs_input_grad(3))
      out[4] = ops::unpermute_weights(dx, saved[3], saved[1], top_k);
    return out;
  }
};

Tensor permute_autograd(const Tensor& x, const Tensor& slot_of, const Tensor& row_of, int64_t top_k,
                        const OptionalTensor& weights) {
  // Weights that require grad are an error only while autograd records: when a graph is traced,
  // unpermute's backward calls permute with weights that are inputs of that graph and require grad.
  const bool recorded = c10::GradMode::is_enabled();
  TORCH_CHECK_VALUE(!weights || !weights->requires_grad() || !recorded,
                    "permute: weights get no gradient here and must not require one; weigh in "
                    "unpermute instead");
  return Permute::apply(x, slot_of, row_of, top_k, weights);
}

Tensor unpermute_autograd(const Tensor& rows, const Tensor& slot_of, const Tensor& row_of,
                          c10::SymInt num_tokens, const OptionalTensor& weights) {
  return Unpermute::apply(rows, slot_of, row_of, num_tokens, weights);
}

}  // namespace

TORCH_LIBRARY_IMPL(moxie, Autograd, m) {
  m.impl("permute", TORCH_FN(permute_autograd));
  m.impl("unpermute", TORCH_FN(unpermute_autograd));
}

}  // namespace moxie::ops
