// swiglu and swiglu_backward followed by quantize, without their result in memory: [R, 2F] -> both
// forms of a [R, F], and both forms of dh [R, 2F]. The bytes of the two ops one after the other, on
// the same backend. Rows that no group covers give zeros, as weight gradients too.
#pragma once

#include "moxie/core/quantize/quantize.h"
#include "moxie/core/swiglu/activation.h"
#include "moxie/core/swiglu/row_weights.h"

namespace moxie {

struct SwigluQuantizeArgs {
  ConstFloatView h;     // [R, 2F]
  QuantizeForms forms;  // of a [R, F]
  std::optional<RowWeights> weights = std::nullopt;
  Activation activation = Activation::kSwiglu;
};
void swiglu_quantize(const SwigluQuantizeArgs& args, const Exec& exec);

struct SwigluBackwardQuantizeArgs {
  ConstFloatView da;    // [R, F]
  ConstFloatView h;     // [R, 2F], as da
  QuantizeForms forms;  // of dh [R, 2F]
  std::optional<WeightGradient> weights = std::nullopt;
  Activation activation = Activation::kSwiglu;
};
void swiglu_backward_quantize(const SwigluBackwardQuantizeArgs& args, const Exec& exec);

}  // namespace moxie
