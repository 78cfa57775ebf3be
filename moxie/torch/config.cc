#include "moxie/torch/config.h"

#include "moxie/core/base/check.h"
#include "moxie/torch/view.h"

namespace moxie {
namespace {

using ops::Recipe;
using ops::Scaling;
using ops::Wgrad;

// Legal, or refused with the reason: parsing its text checks a recipe.
std::string checked_text(const char* op, const Recipe& recipe) {
  const std::string text = ops::to_text(recipe);
  ops::with_op(op, [&] { ops::parse_recipe(text, op); });
  return text;
}

Recipe parse(const char* op, std::string_view name) {
  return ops::with_op(op, [&] { return ops::parse_recipe(name, op); });
}

}  // namespace

MXFP8GroupedMMConfig MXFP8GroupedMMConfig::from_recipe(std::string_view name) {
  constexpr const char* kOp = "MXFP8GroupedMMConfig";
  const Recipe recipe = parse(kOp, name);
  TORCH_CHECK_VALUE(recipe.scaling == Scaling::kBlock, kOp, ": ", name,
                    " is not MXFP8; FP8GroupedMMConfig takes fp8_rowwise");
  return {.kernel_preference = recipe.kernels,
          .out_dtype = recipe.out,
          .wgrad_with_hp = recipe.wgrad == Wgrad::kHighPrecision,
          .scale_calculation_mode = recipe.rule,
          .activations = recipe.activations,
          .weights = recipe.weights,
          .wgrad_dy = recipe.wgrad_dy,
          .wgrad_x = recipe.wgrad_x};
}

std::string MXFP8GroupedMMConfig::recipe() const {
  return checked_text("MXFP8GroupedMMConfig",
                      {.rule = scale_calculation_mode,
                       .activations = activations,
                       .weights = weights,
                       .wgrad_dy = wgrad_dy,
                       .wgrad_x = wgrad_x,
                       .wgrad = wgrad_with_hp ? Wgrad::kHighPrecision : Wgrad::kQuantized,
                       .kernels = kernel_preference,
                       .out = out_dtype});
}

FP8GroupedMMConfig FP8GroupedMMConfig::from_recipe(std::string_view name) {
  constexpr const char* kOp = "FP8GroupedMMConfig";
  const Recipe recipe = parse(kOp, name);
  TORCH_CHECK_VALUE(recipe.scaling == Scaling::kRow, kOp, ": ", name,
                    " has no scale per row; MXFP8GroupedMMConfig takes it");
  return {.out_dtype = recipe.out, .wgrad_with_hp = recipe.wgrad == Wgrad::kHighPrecision};
}

std::string FP8GroupedMMConfig::recipe() const {
  return checked_text("FP8GroupedMMConfig",
                      {.scaling = Scaling::kRow,
                       .wgrad = wgrad_with_hp ? Wgrad::kHighPrecision : Wgrad::kQuantized,
                       .out = out_dtype});
}

MXLinearConfig MXLinearConfig::from_recipe_name(std::string_view name) {
  static constexpr std::pair<std::string_view, std::string_view> kTheirs[] = {
      {"mxfp8_emulated", "mxfp8_emulated_floor"},
      {"mxfp8_cublas", "mxfp8_floor"},
      {"mxfp8_cublas_rceil", "mxfp8_rceil"}};
  for (const auto& [theirs, ours] : kTheirs)
    if (name == theirs) name = ours;
  return {MXFP8GroupedMMConfig::from_recipe(name)};
}

}  // namespace moxie
