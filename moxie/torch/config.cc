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

std::string_view name(FP8GroupedMMRecipe recipe) {
  switch (recipe) {
    case FP8GroupedMMRecipe::kFp8Rowwise: return "fp8_rowwise";
  }
  return "";
}

std::string_view name(MXFP8GroupedMMRecipe recipe) {
  switch (recipe) {
    case MXFP8GroupedMMRecipe::kMxfp8Rceil: return "mxfp8_rceil";
    case MXFP8GroupedMMRecipe::kMxfp8RceilWgradWithHp: return "mxfp8_rceil_wgrad_with_hp";
    case MXFP8GroupedMMRecipe::kMxfp8EmulatedRceil: return "mxfp8_emulated_rceil";
    case MXFP8GroupedMMRecipe::kMxfp8Floor: return "mxfp8_floor";
    case MXFP8GroupedMMRecipe::kMxfp8EmulatedFloor: return "mxfp8_emulated_floor";
    case MXFP8GroupedMMRecipe::kMxfp8EmulatedCeil: return "mxfp8_emulated_ceil";
    case MXFP8GroupedMMRecipe::kMxfp8EmulatedEven: return "mxfp8_emulated_even";
    case MXFP8GroupedMMRecipe::kMxfp8Rceil32x32: return "mxfp8_rceil_32x32";
    case MXFP8GroupedMMRecipe::kMxfp8Rceil128: return "mxfp8_rceil_128";
  }
  return "";
}

std::string_view name(MXLinearRecipeName recipe) {
  switch (recipe) {
    case MXLinearRecipeName::kMxfp8Emulated: return "mxfp8_emulated";
    case MXLinearRecipeName::kMxfp8Cublas: return "mxfp8_cublas";
    case MXLinearRecipeName::kMxfp8CublasRceil: return "mxfp8_cublas_rceil";
    case MXLinearRecipeName::kMxfp8Rceil32x32: return "mxfp8_rceil_32x32";
    case MXLinearRecipeName::kMxfp8Rceil128: return "mxfp8_rceil_128";
  }
  return "";
}

MXFP8GroupedMMConfig MXFP8GroupedMMConfig::from_recipe(std::string_view recipe) {
  constexpr const char* kOp = "MXFP8GroupedMMConfig";
  const Recipe parsed = parse(kOp, recipe);
  TORCH_CHECK_VALUE(parsed.scaling == Scaling::kBlock, kOp, ": ", recipe,
                    " is not MXFP8; FP8GroupedMMConfig takes fp8_rowwise");
  return {.kernel_preference = parsed.kernels,
          .out_dtype = parsed.out,
          .wgrad_with_hp = parsed.wgrad == Wgrad::kHighPrecision,
          .scale_calculation_mode = parsed.rule,
          .activations = parsed.activations,
          .weights = parsed.weights,
          .wgrad_dy = parsed.wgrad_dy,
          .wgrad_x = parsed.wgrad_x};
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

FP8GroupedMMConfig FP8GroupedMMConfig::from_recipe(std::string_view recipe) {
  constexpr const char* kOp = "FP8GroupedMMConfig";
  const Recipe parsed = parse(kOp, recipe);
  TORCH_CHECK_VALUE(parsed.scaling == Scaling::kRow, kOp, ": ", recipe,
                    " has no scale per row; MXFP8GroupedMMConfig takes it");
  return {.out_dtype = parsed.out, .wgrad_with_hp = parsed.wgrad == Wgrad::kHighPrecision};
}

std::string FP8GroupedMMConfig::recipe() const {
  return checked_text("FP8GroupedMMConfig",
                      {.scaling = Scaling::kRow,
                       .wgrad = wgrad_with_hp ? Wgrad::kHighPrecision : Wgrad::kQuantized,
                       .out = out_dtype});
}

MXLinearConfig MXLinearConfig::from_recipe_name(std::string_view recipe) {
  static constexpr std::pair<std::string_view, std::string_view> kTheirs[] = {
      {"mxfp8_emulated", "mxfp8_emulated_floor"},
      {"mxfp8_cublas", "mxfp8_floor"},
      {"mxfp8_cublas_rceil", "mxfp8_rceil"}};
  for (const auto& [theirs, ours] : kTheirs)
    if (recipe == theirs) recipe = ours;
  return {MXFP8GroupedMMConfig::from_recipe(recipe)};
}

}  // namespace moxie
