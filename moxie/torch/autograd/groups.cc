// The autograd nodes of pad_groups and unpad_groups. Both move rows, so their gradients move rows
// back. Rows in no group get a zero gradient, because no result depends on them.
#include <ATen/TensorOperators.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/searchsorted.h>
#include <ATen/ops/where.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "moxie/torch/ops.h"

namespace moxie::ops {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// FP8 is not differentiable, because autograd would round gradients to FP8.
bool is_differentiable(const Tensor& tensor) {
  return at::isFloatingType(tensor.scalar_type()) && tensor.element_size() > 1;
}

struct PadGroups : torch::autograd::Function<PadGroups> {
  static variable_list forward(AutogradContext* ctx, const Tensor& x, const Tensor& offs,
                               int64_t alignment) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    auto [padded, starts, ends] = ops::pad_groups(x, offs, alignment);
    ctx->save_for_backward({offs, starts});
    ctx->saved_data["num_rows"] = x.sym_size(0);
    ctx->mark_non_differentiable({starts, ends});
    ctx->set_materialize_grads(false);  // or torch makes zeros for both in every backward
    return {padded, starts, ends};
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    if (!grads[0].defined()) return variable_list(3);
    const auto saved = ctx->get_saved_variables();
    const auto num_rows = ctx->saved_data["num_rows"].toSymInt();
    return {ops::unpad_groups(grads[0], saved[0], saved[1], num_rows), {}, {}};
  }
};

struct UnpadGroups : torch::autograd::Function<UnpadGroups> {
  static Tensor forward(AutogradContext* ctx, const Tensor& padded, const Tensor& offs,
                        const Tensor& starts, const c10::SymInt& num_rows) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    ctx->save_for_backward({offs, starts});
    ctx->saved_data["padded_rows"] = padded.sym_size(0);
    return ops::unpad_groups(padded, offs, starts, num_rows);
  }

  // pad_groups() cannot compute this gradient: it takes one alignment, and `starts` may be of any.
  // Instead, each row of dx is added to the row of `padded` that it came from. The host does not
  // read offs for that, so it does not wait for the device.
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const auto saved = ctx->get_saved_variables();
    const Tensor &dx = grads[0], &offs = saved[0], &starts = saved[1];
    const auto padded_rows = ctx->saved_data["padded_rows"].toSymInt();
    const Tensor row = at::arange(dx.sym_size(0), offs.options().dtype(at::kLong));
    const Tensor group = at::searchsorted(offs, row, /*out_int32=*/false, /*right=*/true);
    const Tensor covered = row < offs.slice(0, -1);
    const Tensor nearest = group.clamp_max(offs.sym_size(0) - 1);
    const Tensor first =
        at::where(nearest > 0, offs.index_select(0, (nearest - 1).clamp_min(0)), 0);
    // Rows in no group are sent to one extra row at the end, which is dropped afterwards.
    const Tensor to = at::where(covered, starts.index_select(0, nearest) + row - first, padded_rows)
                          .clamp(0, padded_rows);  // malformed offs must not lead out of bounds
    const Tensor dpadded = dx.new_zeros_symint({padded_rows + 1, dx.sym_size(1)});
    return {dpadded.index_add(0, to, dx).narrow_symint(0, 0, padded_rows), {}, {}, {}};
  }
};

std::tuple<Tensor, Tensor, Tensor> pad_groups_autograd(const Tensor& x, const Tensor& offs,
                                                       int64_t alignment) {
  if (!is_differentiable(x) || x.dim() != 2 || !offs.defined()) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    return ops::pad_groups(x, offs, alignment);
  }
  const auto out = PadGroups::apply(x, offs, alignment);
  return {out[0], out[1], out[2]};
}

Tensor unpad_groups_autograd(const Tensor& padded, const Tensor& offs, const Tensor& starts,
                             c10::SymInt num_rows) {
  if (!is_differentiable(padded) || padded.dim() != 2 || !offs.defined()) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    return ops::unpad_groups(padded, offs, starts, num_rows);
  }
  return UnpadGroups::apply(padded, offs, starts, num_rows);
}

}  // namespace

TORCH_LIBRARY_IMPL(moxie, Autograd, m) {
  m.impl("pad_groups", TORCH_FN(pad_groups_autograd));
  m.impl("unpad_groups", TORCH_FN(unpad_groups_autograd));
}

}  // namespace moxie::ops
