// Routing weights of rows, as the SwiGLU ops take them.
#pragma once

#include <ATen/ops/empty.h>

#include "moxie/core/swiglu/row_weights.h"
#include "moxie/torch/view.h"

namespace moxie::ops {

// Checks weights [T, k], f32 (f64 if h is f64), one per row of h, and slot_of, int32 [R].
inline void check_row_weights(const char* op, const Tensor& weights, const Tensor& slot_of,
                              const Tensor& h) {
  const auto dtype = h.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  TORCH_CHECK_TYPE(weights.scalar_type() == dtype, op, ": weights must be ", dtype_name(dtype),
                   ", got ", dtype_name(weights.scalar_type()));
  const c10::SymInt rows = h.sym_size(0);
  TORCH_CHECK_VALUE(
      weights.dim() == 2 &&
          (weights.sym_size(0) * weights.sym_size(1)).sym_eq(rows).expect_true(__FILE__, __LINE__),
      op, ": weights must be [tokens, top_k], one for each of ", rows, " rows, got ",
      weights.sym_sizes());
  check_device({op, "weights", weights}, h);
  TORCH_CHECK_TYPE(slot_of.scalar_type() == at::kInt, op, ": slot_of must be torch.int32, got ",
                   dtype_name(slot_of.scalar_type()));
  check_shape({op, "slot_of", slot_of}, {rows});
  check_device({op, "slot_of", slot_of}, h);
}

inline Result weight_gradient_of(const Tensor& weights) {
  return {"dweights", weights.scalar_type(), sym_shape(weights)};
}

// Routing weights as the core takes them; owns the dense tensors that its views point into.
struct DenseRowWeights {
  Tensor weights, slot_of;

  DenseRowWeights(const Tensor& of, const Tensor& slots)
      : weights(dense(of)), slot_of(dense(slots)) {}
  // The core takes [T, k] as [T * k], which is the same memory.
  RowWeights view() const {
    return {{static_cast<const float*>(weights.const_data_ptr()), {weights.numel()}},
            const_view<int32_t>(slot_of)};
  }
  WeightGradient gradient(const Tensor& dweights, const Tensor& workspace) const {
    return {view(),
            {static_cast<float*>(dweights.mutable_data_ptr()), {dweights.numel()}},
            ops::view<float>(workspace)};
  }
};

// The workspace that swiglu_backward needs for the gradient of the weights: f32 [R, tiles] on a
// GPU, else empty.
inline Tensor weight_gradient_workspace(const Tensor& da) {
  const int64_t tiles = da.is_cuda() ? weight_gradient_tiles<int64_t>(da.size(1)) : 0;
  return at::empty({da.size(0), tiles}, da.options().dtype(at::kFloat));
}

}  // namespace moxie::ops
