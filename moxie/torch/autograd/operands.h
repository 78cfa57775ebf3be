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

// Which forms to make, and the plan that says how.
struct FormsWanted {
  const Plan& plan;
  const OptionalTensor& offs;
  Role role;
  Need need;
};

// x or dy [R, C]
QuantizedForms quantize_tokens(const FormsWanted& wanted, const Tensor& x);

// The activation between w13 and w2, and the routing weights of the rows. `weights` and `slot_of`
// are both present or both absent.
struct RowActivation {
  Activation activation = Activation::kSwiglu;
  OptionalTensor weights = std::nullopt;  // [T, k]
  OptionalTensor slot_of = std::nullopt;  // [R]

  Tensor forward(const Tensor& h) const;  // a, in high precision
  // dh in high precision, and the gradient of the weights, undefined without weights.
  std::tuple<Tensor, Tensor> backward(const Tensor& da, const Tensor& h) const;
};
// Quantize the result of swiglu, swiglu_backward or permute: in one fused op if the plan fuses,
// else in two ops.
QuantizedForms quantize_swiglu(const FormsWanted& wanted, const Tensor& h,
                               const RowActivation& glu);
struct SwigluGrads {
  QuantizedForms dh;
  Tensor dweights;  // undefined without weights
  Tensor values;    // dh before it is quantized, where wanted: then the two ops are not one
};
enum class Values : bool { kNotWanted, kWanted };
SwigluGrads quantize_swiglu_backward(const FormsWanted& wanted, const Tensor& da, const Tensor& h,
                                     const RowActivation& glu, Values values);
QuantizedForms quantize_permuted(const FormsWanted& wanted, const Tensor& x,
                                 const Permutation& permutation);
// w [G, N, K]
QuantizedForms quantize_weights(const Plan& plan, const Tensor& w, Need need);

// For an x that the caller has quantized, with the recipe's block or one whose scales can be
// replicated to it: the operand of forward, and that of wgrad (from the saved qdata and scale).
void check_quantized_x(const Recipe& recipe, const char* op, const MxTensor& x);
Quantized rowwise_of_quantized_x(const Plan& plan, const Quantized& x, const OptionalTensor& offs);
Quantized colwise_of_quantized_x(const Plan& plan, const Quantized& x, const OptionalTensor& offs);

}  // namespace moxie::ops
