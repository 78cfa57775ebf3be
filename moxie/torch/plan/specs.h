// Specs of the quantizers of a call: the forms of x, dy and w that its recipe and plan need.
#pragma once

#include "moxie/torch/ops/quantize.h"
#include "moxie/torch/plan/plan.h"

namespace moxie::ops {

enum class Need : uint8_t { kRowwise, kColwise, kBoth };
// Which recipe field gives the block of the colwise form: wgrad_x or wgrad_dy.
enum class Role : uint8_t { kX, kDy };

QuantizeSpec tokens_spec(const Plan& plan, Role role, Need need);
QuantizeSpec weights_spec(const Recipe& recipe, ScaleLayout layout, Need need);

// The layout of a cached w. If the shape of one form fits two layouts, the other form decides.
struct CachedWeights {
  const Tensor &qdata, &scale, &qdata_t, &scale_t;
};
ScaleLayout layout_by_shape(const Recipe& recipe, Kernel forward, const CachedWeights& w);

}  // namespace moxie::ops
