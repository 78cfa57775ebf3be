// swiglu: h [R, 2F] holds gate [R, F] beside up [R, F],
//   a = silu(gate) * up,   silu(z) = z / (1 + e^-z)
// or another activation of gate and up (activation.h), in f32, rounded once. With routing weights
// the result is weight * a, and da in backward is the gradient of that result. NUMERICS.md, section
// 8.
#pragma once

#include <optional>

#include "moxie/core/base/exec.h"
#include "moxie/core/base/view.h"
#include "moxie/core/format/bf16.h"
#include "moxie/core/swiglu/activation.h"
#include "moxie/core/swiglu/row_weights.h"

namespace moxie {

struct SwigluArgs {
  ConstFloatView h;  // [R, 2F]
  FloatView a;       // [R, F]; the format of h
  std::optional<RowWeights> weights = std::nullopt;
  Activation activation = Activation::kSwiglu;
};
void swiglu(const SwigluArgs& args, const Exec& exec);

// Computes dh from da and h, all of one format.
struct SwigluBackwardArgs {
  ConstFloatView da;  // [R, F]
  ConstFloatView h;   // [R, 2F]
  FloatView dh;       // [R, 2F]
  std::optional<WeightGradient> weights = std::nullopt;
  Activation activation = Activation::kSwiglu;
};
void swiglu_backward(const SwigluBackwardArgs& args, const Exec& exec);

}  // namespace moxie
