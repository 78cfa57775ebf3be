// swiglu_quantize is swiglu followed by quantize, swiglu_backward_quantize is swiglu_backward
// followed by quantize, but what they pass on is never in memory: h [R, 2F] gives both forms of a
// [R, F], da and h give both forms of dh [R, 2F]. The bytes are those of the two ops one after the
// other, on the same backend. Rows that no group covers give zeros, and their weights have the
// gradient 0.
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
