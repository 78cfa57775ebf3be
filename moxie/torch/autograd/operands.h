// Quantizes x, w and dy to the operands of the three passes, as the call's plan says.
#pragma once

#include "moxie/core/swiglu/activation.h"
#include "moxie/torch/mx_tensor.h"
#include "moxie/torch/plan/specs.h"

namespace moxie::ops {

struct QuantizedForms {
  Quantized rowwise;  // contracted over columns
  Quantized colwise;  // contracted over rows, stored transposed
};

// Which forms to make of a tensor, and by which plan.
struct FormsWanted {
  const Plan& plan;
  const OptionalTensor& offs;
  Role role;
  Need need;
};

// Quantizes x or dy, [R, C].
QuantizedForms quantize_tokens(const FormsWanted& wanted, const Tensor& x);

// The activation between w13 and w2, times the routing weights of the rows, if there are any.
// `weights` and `slot_of` are both present or both absent.
struct RowActivation {
  Activation activation = Activation::kSwiglu;
  OptionalTensor weights = std::nullopt;  // [T, k]
  OptionalTensor slot_of = std::nullopt;  // [R]

  Tensor forward(const Tensor& h) const;  // returns a, not quantized
  // Returns dh, not quantized, and the gradient of the weights, undefined without weights.
  std::tuple<Tensor, Tensor> backward(const Tensor& da, const Tensor& h) const;
};
// Quantize the result of swiglu, swiglu_backward or permute: in one fused op if the plan says so,
// else in two ops.
QuantizedForms quantize_swiglu(const FormsWanted& wanted, const Tensor& h,
                               const RowActivation& glu);
struct SwigluGrads {
  QuantizedForms dh;
  Tensor dweights;  // undefined without weights
  Tensor values;    // dh before it is quantized, if asked for (then no fused op is used)
};
enum class Values : bool { kNotWanted, kWanted };
SwigluGrads quantize_swiglu_backward(const FormsWanted& wanted, const Tensor& da, const Tensor& h,
                                     const RowActivation& glu, Values values);
QuantizedForms quantize_permuted(const FormsWanted& wanted, const Tensor& x,
                                 const Permutation& permutation);
// w [G, N, K]
QuantizedForms quantize_weights(const Plan& plan, const Tensor& w, Need need);

// For an x that the caller has quantized, in the recipe's block, or in 1x128 for a recipe with
// 1x32. rowwise_of_quantized_x() makes the operand of forward, colwise_of_quantized_x() that of
// wgrad from the saved qdata and scale.
void check_quantized_x(const Recipe& recipe, const char* op, const MxTensor& x);
Quantized rowwise_of_quantized_x(const Plan& plan, const Quantized& x, const OptionalTensor& offs);
Quantized colwise_of_quantized_x(const Plan& plan, const Quantized& x, const OptionalTensor& offs);

}  // namespace moxie::ops
