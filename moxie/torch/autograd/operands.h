// The operands of the three passes, made from x, w and dy as the plan of a call says.
#pragma once

#include "moxie/torch/mx_tensor.h"
#include "moxie/torch/plan/specs.h"

namespace moxie::ops {

struct QuantizedForms {
  Quantized rowwise;  // contracted over columns
  Quantized colwise;  // contracted over rows, stored transposed
};

// x or dy [R, C]
QuantizedForms quantize_tokens(const Plan& plan, const Tensor& x, const OptionalTensor& offs,
                               Role role, Need need);
// The same of what swiglu, swiglu_backward and permute give, in one op with it. Only where fuses();
// need is rowwise or both, for swiglu_backward both.
bool fuses(const Plan& plan, Need need);
QuantizedForms quantize_swiglu(const Plan& plan, const Tensor& h, const OptionalTensor& offs,
                               Need need);
QuantizedForms quantize_swiglu_backward(const Plan& plan, const Tensor& da, const Tensor& h,
                                        const OptionalTensor& offs);
QuantizedForms quantize_permuted(const Plan& plan, const Tensor& x, const Permutation& permutation,
                                 const OptionalTensor& offs, Need need);
// w [G, N, K]
QuantizedForms quantize_weights(const Plan& plan, const Tensor& w, Need need);

// The operands of an x that came quantized, in any block that replicated scales turn into that of
// the recipe: what forward reads, and what wgrad reads (of its qdata and scale, which were kept).
void check_quantized_x(const Recipe& recipe, const char* op, const MxTensor& x);
Quantized rowwise_of_quantized_x(const Plan& plan, const Quantized& x, const OptionalTensor& offs);
Quantized colwise_of_quantized_x(const Plan& plan, const Quantized& x, const OptionalTensor& offs);

}  // namespace moxie::ops
