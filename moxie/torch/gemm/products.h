// The three passes on each path. Arguments arrive checked; nothing here is differentiable.
#pragma once

#include "moxie/core/base/math.h"
#include "moxie/core/gemm/product.h"
#include "moxie/torch/gemm/operands.h"

namespace moxie::ops {

struct PassArgs {
  Pass pass;
  Recipe recipe;
  Quantized a;            // forward x [R, K]; dgrad dy [R, N]; wgrad dy_t [N, R'], or dy [R, N]
  Quantized b;            // w [G, N, K]; w_t [G, K, N], or w; x_t [K, R'], or x [R, K]
  OptionalTensor offs;    // [G]; absent: one group
  OptionalTensor bias;    // forward
  OptionalTensor add_to;  // wgrad: the f32 gradient to add to, instead of a result of its own
  Shape out;              // [R, N]; [R, K]; [G, N, K]
  at::ScalarType dtype;   // of the result
  ScaleLayout layout;     // of the scales of tokens; those of w: layout_of_weights()

  int64_t num_rows = 0;  // R
  Sum sum() const { return add_to ? Sum::kAdd : Sum::kOverwrite; }
  Tensor allocate() const;  // add_to, if there is one
};

// A dense quantized operand as core's GEMMs take it.
inline GemmOperand gemm_operand(const Quantized& operand, OperandForm as,
                                ScaleLayout layout = ScaleLayout::kPlain) {
  return {const_view<e4m3>(operand.data), const_view<e8m0>(*operand.scale),
          outer_of(as.block, as.form), k_of(as.block, as.form), layout};
}
// The layout of an operand's scales.
inline ScaleLayout layout_in(const PassArgs& args, const Quantized& operand, OperandForm as) {
  return operand.data.dim() == 3
             ? layout_of_weights(Path::kEmulated, *operand.scale, operand.data, as)
             : args.layout;
}

// What a ragged size of a product on a CPU is rounded up to. oneDNN compiles a kernel for every new
// size in bf16, which takes as long as a small product does; this way there are few of them.
constexpr int64_t ragged_step(at::ScalarType dtype) { return dtype == at::kBFloat16 ? 32 : 1; }

// Rows that are computed for a group: as many, but none past the last there is. The additional
// ones belong to the groups that follow, and those come later.
inline int64_t computed_rows(int64_t rows, int64_t left, at::ScalarType dtype) {
  const int64_t rounded = round_up(rows, ragged_step(dtype));
  return rounded <= left ? rounded : rows;
}

// Operands in high precision and natural order: at::mm per group on a CPU, torch's grouped product
// or core's plain one on a GPU.
Tensor multiply_plain(const PassArgs& args);
// Decoded operands through multiply_plain(), or panel by panel on a CPU.
Tensor multiply_emulated(const PassArgs& args);
// Core's Hopper kernel; nothing if it does not take the problem.
OptionalTensor multiply_sm90(const PassArgs& args);
// torch's _scaled_grouped_mm with one f32 scale per row; nothing if it does not take the problem.
OptionalTensor multiply_sm90_rows(const PassArgs& args);
// torch's _scaled_grouped_mm, with swizzled scales.
Tensor multiply_sm100(const PassArgs& args);

}  // namespace moxie::ops
