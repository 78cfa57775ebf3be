// The operands of the three passes, made from x, w and dy as the plan of a call says.
#pragma once

#include "moxie/torch/mx_tensor.h"
#include "moxie/torch/plan/specs.h"

namespace moxie::ops {

struct QuantizedForms {
  Quantized rowwise;  // contracted over columns
  Quantized colwise;  // contracted over rows, stored transposed
};

// What is quantized, and as what.
struct FormsWanted {
  const Plan& plan;
  const OptionalTensor& offs;
  Role role;
  Need need;
};

// x or dy [R, C]
QuantizedForms quantize_tokens(const FormsWanted& wanted, const Tensor& x);

// The routing weights of rows; both absent where rows have none.
struct RoutingWeights {
  OptionalTensor weights = std::nullopt;  // [T, k]
  OptionalTensor slot_of = std::nullopt;  // [R]
};
// The forms of what swiglu, swiglu_backward and permute give: in one op with it where the plan has
// such an op, else one after the other.
QuantizedForms quantize_swiglu(const FormsWanted& wanted, const Tensor& h,
                               const RoutingWeights& by_row);
struct SwigluGrads {
  QuantizedForms dh;
  Tensor dweights;  // undefined without weights
};
SwigluGrads quantize_swiglu_backward(const FormsWanted& wanted, const Tensor& da, const Tensor& h,
                                     const RoutingWeights& by_row);
QuantizedForms quantize_permuted(const FormsWanted& wanted, const Tensor& x,
                                 const Permutation& permutation);
// w [G, N, K]
QuantizedForms quantize_weights(const Plan& plan, const Tensor& w, Need need);

// The operands of an x that came quantized, in any block that replicated scales turn into that of
// the recipe: what forward reads, and what wgrad reads (of its qdata and scale, which were kept).
void check_quantized_x(const Recipe& recipe, const char* op, const MxTensor& x);
Quantized rowwise_of_quantized_x(const Plan& plan, const Quantized& x, const OptionalTensor& offs);
Quantized colwise_of_quantized_x(const Plan& plan, const Quantized& x, const OptionalTensor& offs);

}  // namespace moxie::ops
