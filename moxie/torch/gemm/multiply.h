// The three passes, each with the kernel that its plan names. Arguments arrive checked; nothing
// here is differentiable.
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
  Quantized a;            // forward x [R, K]; dgrad dy [R, N]; wgrad dy_t [N, R'], or dy [R, N]
  Quantized b;            // w [G, N, K]; w_t [G, K, N], or w; x_t [K, R'], or x [R, K]
  OptionalTensor offs;    // [G]; absent: one group
  OptionalTensor bias;    // forward
  OptionalTensor add_to;  // wgrad: the f32 gradient to add to, instead of a result of its own
  Shape out;              // [R, N]; [R, K]; [G, N, K]
  at::ScalarType dtype;   // of the result
  int64_t num_rows = 0;   // R
  Padding padding = Padding::kZeros;  // wgrad in FP8: of the groups of a and b

  const Recipe& recipe() const { return plan.recipe; }
  Sum sum() const { return add_to ? Sum::kAdd : Sum::kOverwrite; }
  // The layout of an operand's scales: weights have three dims.
  ScaleLayout layout_of(const Quantized& operand) const {
    return operand.data.dim() == 3 ? plan.weights : plan.tokens;
  }
  Tensor allocate() const;  // add_to, if there is one
};

// A dense quantized operand as core's GEMMs take it.
inline GemmOperand gemm_operand(const Quantized& operand, FormAndBlock as, ScaleLayout layout) {
  return {const_view<e4m3>(operand.data), const_view<e8m0>(*operand.scale),
          outer_of(as.block, as.form), k_of(as.block, as.form), layout};
}

// oneDNN compiles a kernel for every new size in bf16, which takes as long as a small product does.
// So ragged sizes of a product on a CPU are rounded up to a multiple of this.
constexpr int64_t ragged_step(at::ScalarType dtype) { return dtype == at::kBFloat16 ? 32 : 1; }

// Rows that are computed for a group: rounded up, where there are so many. The additional ones
// belong to the groups that follow, and those are computed later.
inline int64_t computed_rows(int64_t rows, int64_t left, at::ScalarType dtype) {
  const int64_t rounded = round_up(rows, ragged_step(dtype));
  return rounded <= left ? rounded : rows;
}

Tensor multiply(const PassArgs& args);

// Operands in high precision and natural order, with any kernel that takes them (plain.cc).
Tensor multiply_plain(const PassArgs& args);
// The ends of the groups for torch's kernels, each group rounded up to the alignment. Those kernels
// trust what they are given, and one wrong end costs the process its CUDA context: whatever offs
// hold, these rise and stay inside the rows.
Tensor ends_for_torch(const PassArgs& args, const Tensor& offs, int64_t alignment,
                      const Exec& exec);
// What torch's products leave as they found it: rows that no group covers become 0, the others get
// their bias.
void finish_by_torch(const PassArgs& args, const Tensor& offs, const Tensor& out, const Exec& exec);
// FP8 operands, decoded for such a kernel (decode.cc).
Tensor multiply_decoded(const PassArgs& args);
// FP8 operands on tensor cores (fp8.cc).
Tensor multiply_sm90(const PassArgs& args);
Tensor multiply_sm90_rows(const PassArgs& args);
Tensor multiply_sm100(const PassArgs& args);

}  // namespace moxie::ops
