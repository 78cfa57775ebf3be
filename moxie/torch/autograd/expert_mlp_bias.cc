#include <ATen/ops/searchsorted.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>

#include "moxie/torch/autograd/expert_mlp.h"

namespace moxie::ops::mlp {

Tensor b2_gradient(const BiasArgs& args) {
  const auto& [dy, offs, of_dy, weights] = args;
  if (!weights) return sum_groups(dy, offs);
  // dy in f32 (f64 if the weights are), so that weight * dy is not rounded to bf16 before it is
  // added.
  const auto& [slot_of, row_of, top_k] = of_dy;
  const Tensor rows = permute(dy.to(weights->scalar_type()), *slot_of, *row_of, top_k, weights);
  return sum_groups(rows, offs);
}

Tensor b2_weight_gradient(const BiasArgs& args, const Tensor& b2) {
  const auto& [dy, offs, of_dy, weights] = args;
  const Tensor dots = gate_logits(dy, b2);  // [T, G]: each token's dy times each group's b2
  if (!offs) return dots.expand_symint(weights->sym_sizes());
  // Picks the group that holds the slot's row. Rows in no group get 0: y does not contain them.
  const Tensor group = at::searchsorted(*offs, *of_dy.row_of, /*out_int32=*/false, /*right=*/true)
                           .view_symint(weights->sym_sizes());
  const int64_t last = offs->size(0) - 1;
  const Tensor own = dots.gather(1, group.clamp_max(last));
  return at::where(group.gt(last), at::zeros_like(own), own);
}

}  // namespace moxie::ops::mlp
