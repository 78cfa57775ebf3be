#include "moxie/torch/plan/specs.h"

namespace moxie::ops {
namespace {

struct Blocks {
  Block rowwise, colwise;
};

QuantizeSpec spec_of(const Recipe& recipe, ScaleLayout layout, const Blocks& blocks, Need need) {
  QuantizeSpec spec{.scaling = recipe.scaling,
                    .rule = recipe.rule,
                    .layout = layout,
                    .scales_too_small = recipe.scales_too_small};
  if (need != Need::kColwise) spec.rowwise = blocks.rowwise;
  if (need != Need::kRowwise) spec.colwise = blocks.colwise;
  return spec;
}

}  // namespace

QuantizeSpec tokens_spec(const Plan& plan, Role role, Need need) {
  const Recipe& recipe = plan.recipe;
  const Block colwise = role == Role::kX ? recipe.wgrad_x : recipe.wgrad_dy;
  return spec_of(recipe, plan.layout, {recipe.activations, colwise}, need);
}

QuantizeSpec weights_spec(const Recipe& recipe, ScaleLayout layout, Need need) {
  return spec_of(recipe, layout, {recipe.weights, recipe.weights_t()}, need);
}

ScaleLayout layout_by_shape(const Recipe& recipe, Kernel forward, const CachedWeights& w) {
  const ScaleLayout rowwise = layout_by_shape(recipe, forward, {w.qdata, w.scale, Pass::kForward});
  if (rowwise != ScaleLayout::kPlain) return rowwise;
  return layout_by_shape(recipe, forward, {w.qdata_t, w.scale_t, Pass::kDgrad});
}

}  // namespace moxie::ops
