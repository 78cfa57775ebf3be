// What the quantizers of a call make of x, dy and w, as its recipe and its plan say.
#pragma once

#include "moxie/torch/ops/quantize.h"
#include "moxie/torch/plan/plan.h"

namespace moxie::ops {

enum class Need : uint8_t { kRowwise, kColwise, kBoth };
// The blocks of the colwise form are those of wgrad_x or wgrad_dy.
enum class Role : uint8_t { kX, kDy };

QuantizeSpec tokens_spec(const Plan& plan, Role role, Need need);
QuantizeSpec weights_spec(const Recipe& recipe, ScaleLayout layout, Need need);

// The layout of a cached w: where the shape of one form fits two layouts, the other form tells.
struct CachedWeights {
  const Tensor &qdata, &scale, &qdata_t, &scale_t;
};
ScaleLayout layout_by_shape(const Recipe& recipe, Kernel forward, const CachedWeights& w);

}  // namespace moxie::ops
