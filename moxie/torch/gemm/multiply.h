// The three passes, each multiplied by the kernel that its plan names. The caller must have checked
// the arguments; nothing here is differentiable.
#pragma once

#include "moxie/core/base/exec.h"
#include "moxie/core/base/math.h"
#include "moxie/core/gemm/operand.h"
#include "moxie/torch/plan/plan.h"
#include "moxie/torch/view.h"

namespace moxie::ops {

struct PassArgs {
  Pass pass;
  PassPlan plan;
  Quantized a;  // forward x [R, K]; dgrad dy [R, N]; wgrad dy_t [N, R'] in FP8, else dy [R, N]
  Quantized b;  // w [G, N, K]; w_t [G, K, N], or w; x_t [K, R'], or x [R, K]
  OptionalTensor offs;                // [G]; absent: one group
  OptionalTensor bias;                // forward
  OptionalTensor add_to;              // wgrad: the f32 gradient to add to; absent: a new result
  Shape out;                          // forward [R, N]; dgrad [R, K]; wgrad [G, N, K]
  at::ScalarType dtype;               // of the result
  int64_t num_rows = 0;               // R
  Padding padding = Padding::kZeros;  // what the padding of a and b holds, for wgrad in FP8

  const Recipe& recipe() const { return plan.recipe; }
  Sum sum() const { return add_to ? Sum::kAdd : Sum::kOverwrite; }
  // The layout of an operand's scales. Operands with three dims are weights, the others tokens.
  ScaleLayout layout_of(const Quantized& operand) const {
    return operand.data.dim() == 3 ? plan.weights : plan.tokens;
  }
  Tensor allocate() const;  // returns add_to if there is one
};

// Converts a dense quantized operand to the core's type.
inline GemmOperand gemm_operand(const Quantized& operand, FormAndBlock as, ScaleLayout layout) {
  return {const_view<e4m3>(operand.data), const_view<e8m0>(*operand.scale),
          outer_of(as.block, as.form), k_of(as.block, as.form), layout};
}

// On a CPU, sizes of GEMMs that depend on group sizes are rounded up to a multiple of this: oneDNN
// compiles a bf16 kernel for every new size, which takes as long as a small GEMM.
constexpr int64_t ragged_step(at::ScalarType dtype) { return dtype == at::kBFloat16 ? 32 : 1; }

// The number of rows to compute for a group: its rows, rounded up if `left` rows remain from its
// first row on. The additional rows belong to the following groups, which overwrite them later.
inline int64_t computed_rows(int64_t rows, int64_t left, at::ScalarType dtype) {
  const int64_t rounded = round_up(rows, ragged_step(dtype));
  return rounded <= left ? rounded : rows;
}

Tensor multiply(const PassArgs& args);

// Multiplies operands in bf16, f32 or f64 that are not transposed (plain.cc).
Tensor multiply_plain(const PassArgs& args);
// The ends of groups as torch's kernels take them, each group rounded up to the alignment. Those
// kernels trust their offs, and a wrong end would destroy the process's CUDA context; so these ends
// never decrease and stay inside the rows, whatever offs hold.
Tensor ends_for_torch(const PassArgs& args, const Tensor& offs, int64_t alignment,
                      const Exec& exec);
// Completes a result of torch's kernels: zeroes the rows in no group, and adds the bias to the
// rest.
void finish_by_torch(const PassArgs& args, const Tensor& offs, const Tensor& out, const Exec& exec);
// Decodes FP8 operands, then multiplies in high precision (decode.cc).
Tensor multiply_decoded(const PassArgs& args);
// Multiplies FP8 operands on tensor cores (fp8.cc).
Tensor multiply_sm90(const PassArgs& args);
Tensor multiply_sm90_rows(const PassArgs& args);
Tensor multiply_sm100(const PassArgs& args);

}  // namespace moxie::ops
