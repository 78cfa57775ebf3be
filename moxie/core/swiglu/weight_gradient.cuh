// The gradient of the routing weights, where no tile kernel has made it on its way.
#pragma once

#include "moxie/core/swiglu/backends.h"

namespace moxie::cuda {

// From da and h; 0 for rows that no group covers. Without offs groups cover all.
struct WeightGradientArgs {
  const WeightGradient& to;
  ConstFloatView da, h;  // [R, F] and [R, 2F]
  Activation activation = Activation::kSwiglu;
  OptionalOffs offs = std::nullopt;
};
void weight_gradient(const char* op, const WeightGradientArgs& args, void* stream);
// From the sums of tiles that are in the workspace.
void sum_weight_tiles(const char* op, const WeightGradient& to, void* stream);

}  // namespace moxie::cuda
