// The gradient of the routing weights: all of it, or the last step if the quantizer's source has
// left sums of tiles (SwigluBackwardSource).
#pragma once

#include "moxie/core/swiglu/backends.h"

namespace moxie::cuda {

// weight_gradient() computes dweights from da and h: 0 for rows that no group covers. Without offs,
// groups cover all rows.
struct WeightGradientArgs {
  const WeightGradient& to;
  ConstFloatView da, h;  // [R, F] and [R, 2F]
  Activation activation = Activation::kSwiglu;
  OptionalOffs offs = std::nullopt;
};
void weight_gradient(const char* op, const WeightGradientArgs& args, void* stream);
// Computes dweights from the sums of tiles in the workspace, of which it reads the rows that groups
// cover.
void sum_weight_tiles(const char* op, const WeightGradient& to, const OptionalOffs& offs,
                      void* stream);

}  // namespace moxie::cuda
