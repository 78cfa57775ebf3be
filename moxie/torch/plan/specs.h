// The specs that tell quantizers which forms of x, dy and w to make, as the recipe and the plan
// need them.
#pragma once

#include "moxie/torch/ops/quantize.h"
#include "moxie/torch/plan/plan.h"

namespace moxie::ops {

enum class Need : uint8_t { kRowwise, kColwise, kBoth };
// Whether tokens are x or dy: the block of their colwise form is the recipe's wgrad_x or wgrad_dy.
enum class Role : uint8_t { kX, kDy };

QuantizeSpec tokens_spec(const Plan& plan, Role role, Need need);
QuantizeSpec weights_spec(const Recipe& recipe, ScaleLayout layout, Need need);

// The layout of a cached w's scales. Some shapes fit two layouts; then the shape of the other form
// decides.
struct CachedWeights {
  const Tensor &qdata, &scale, &qdata_t, &scale_t;
};
ScaleLayout layout_by_shape(const Recipe& recipe, Kernel forward, const CachedWeights& w);

}  // namespace moxie::ops
