// The arguments of expert_mlp after checking, and its plan. The node is in expert_mlp.cc.
#pragma once

#include "moxie/torch/autograd/linear.h"
#include "moxie/torch/ops.h"
#include "moxie/torch/w13_layout.h"

namespace moxie::ops::mlp {

inline constexpr const char* kOp = "expert_mlp";

// How h, the input of SwiGLU, waits for backward: as it is, or in FP8.
enum class Keep : int64_t { kH, kFp8 };

struct Args {
  const Tensor &x, &w13, &w2;
  const ExpertMlpOptions& options;
};

struct Call {
  MlpPlan plan;
  Keep keep;
  Activation activation;
  W13Layout layout;
  const ExpertMlpOptions& options;
  OptionalTensor stats = std::nullopt;  // f64 [2, 6, 5]

  Permutation permutation() const { return {options.slot_of, options.row_of, options.top_k}; }
  at::ScalarType rows_dtype(const Tensor& x) const {
    return options.x_dtype.value_or(x.scalar_type());
  }
};

// Which arguments need gradients, and which gradients of inner results follow from that.
struct Needs {
  bool x = false, w13 = false, w2 = false, weights = false, b13 = false, b2 = false;

  bool dh() const { return x || w13 || b13; }
  bool da() const { return dh() || weights; }
  bool any() const { return da() || w2 || b2; }
};

// Checks all arguments, then makes the plan.
Call checked_call(const Args& args, const Needs& needs);
void check_stats(const Tensor& stats, const Tensor& x);

// Converts the arguments, in the order of the schema, to options.
inline ExpertMlpOptions options_of(
    const OptionalTensor& offs, std::string_view recipe, const OptionalTensors& quantized_w13,
    const OptionalTensors& quantized_w2, const OptionalTensor& main_grad13,
    const OptionalTensor& main_grad2, const OptionalTensor& slot_of, const OptionalTensor& row_of,
    int64_t top_k, const OptionalTensor& weights, std::string_view keep,
    std::optional<at::ScalarType> x_dtype, std::string_view activation, const OptionalTensor& b13,
    const OptionalTensor& b2, std::string_view w13_layout) {
  return {.offs = offs,
          .recipe = recipe,
          .quantized_w13 = quantized_w13,
          .quantized_w2 = quantized_w2,
          .main_grad13 = main_grad13,
          .main_grad2 = main_grad2,
          .slot_of = slot_of,
          .row_of = row_of,
          .top_k = top_k,
          .weights = weights,
          .keep = keep,
          .x_dtype = x_dtype,
          .activation = activation,
          .b13 = b13,
          .b2 = b2,
          .w13_layout = w13_layout};
}

// Adds to stats what quantization loses of each operand of both products (stats.h).
struct ForwardOperands {
  const Tensor &x, &h;  // x is tokens if call.permutation() has indices, else rows
  const Tensor &w13, &w2;
};
void add_forward_stats(const Tensor& stats, const ForwardOperands& of, const Call& call);
struct BackwardOperands {
  const Tensor &dy, &da, &h;  // dy is tokens if `permutation` has indices, else rows
  Permutation permutation;    // from the tokens of dy to rows
  RowActivation glu;
  const OptionalTensor& offs;
  std::string_view recipe;
};
void add_backward_stats(const Tensor& stats, const BackwardOperands& of);

// ---- gradients that b2 takes part in (expert_mlp_bias.cc) ----

struct BiasArgs {
  const Tensor& dy;  // rows [R, D], or with weights tokens [T, D]
  const OptionalTensor& offs;
  const Permutation& of_dy;
  const OptionalTensor& weights;
};
// The gradient of b2, f32 [G, D]: the sum of dy, or with weights of weight * dy, over each group's
// rows.
Tensor b2_gradient(const BiasArgs& args);
// What b2 adds to the gradient of the weights, [T, k]: for each slot, the dot product of its
// token's dy with the b2 of its expert.
Tensor b2_weight_gradient(const BiasArgs& args, const Tensor& b2);

}  // namespace moxie::ops::mlp
