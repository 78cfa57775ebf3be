// Configs with the names and fields that people know from torchao; each stands for a recipe. Python
// has the same ones.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <variant>

#include "moxie/torch/recipe.h"

namespace moxie {

using KernelPreference = ops::Kernels;
using ScaleCalculationMode = ScaleRule;

// Recipes by name; from_recipe() takes these or their text, which name() gives.
enum class FP8GroupedMMRecipe : uint8_t { kFp8Rowwise };
enum class MXFP8GroupedMMRecipe : uint8_t {
  kMxfp8Rceil,
  kMxfp8RceilWgradWithHp,
  kMxfp8EmulatedRceil,
  kMxfp8Floor,
  kMxfp8EmulatedFloor,
  kMxfp8EmulatedCeil,
  kMxfp8EmulatedEven,
  kMxfp8Rceil32x32,
  kMxfp8Rceil128,
};
// Those named after a library run on the fastest kernels of the device, as all others do.
enum class MXLinearRecipeName : uint8_t {
  kMxfp8Emulated,
  kMxfp8Cublas,
  kMxfp8CublasRceil,
  kMxfp8Rceil32x32,
  kMxfp8Rceil128,
};
std::string_view name(FP8GroupedMMRecipe recipe);
std::string_view name(MXFP8GroupedMMRecipe recipe);
std::string_view name(MXLinearRecipeName recipe);

struct MXFP8GroupedMMConfig {
  KernelPreference kernel_preference = KernelPreference::kAuto;
  std::optional<at::ScalarType> out_dtype = std::nullopt;  // that of the activations
  bool wgrad_with_hp = false;
  ScaleCalculationMode scale_calculation_mode = ScaleCalculationMode::kRceil;
  bool pad_token_groups_for_grouped_mm = false;  // accepted, without effect: nothing is padded
  Block activations = {1, 32}, weights = {1, 32}, wgrad_dy = {32, 1}, wgrad_x = {32, 1};
  bool weight_cache = false;  // weights are quantized by refresh(), not in every forward: convert.h

  bool operator==(const MXFP8GroupedMMConfig&) const = default;

  static MXFP8GroupedMMConfig from_recipe(std::string_view recipe);
  static MXFP8GroupedMMConfig from_recipe(MXFP8GroupedMMRecipe recipe) {
    return from_recipe(name(recipe));
  }
  // The text that ops and modules take. Throws where the fields do not go together.
  std::string recipe() const;
};

struct FP8GroupedMMConfig {
  std::optional<at::ScalarType> out_dtype = std::nullopt;
  bool wgrad_with_hp = false;
  bool pad_token_groups_for_grouped_mm = false;
  bool weight_cache = false;

  bool operator==(const FP8GroupedMMConfig&) const = default;

  static FP8GroupedMMConfig from_recipe(std::string_view recipe);
  static FP8GroupedMMConfig from_recipe(FP8GroupedMMRecipe recipe) {
    return from_recipe(name(recipe));
  }
  std::string recipe() const;
};

using GroupedMMConfig = std::variant<MXFP8GroupedMMConfig, FP8GroupedMMConfig>;

// A linear's fields are those of the experts' config; the names of its recipes are torchao's or
// ours.
struct MXLinearConfig : MXFP8GroupedMMConfig {
  static MXLinearConfig from_recipe_name(std::string_view recipe);
  static MXLinearConfig from_recipe_name(MXLinearRecipeName recipe) {
    return from_recipe_name(name(recipe));
  }
  static MXLinearConfig from_recipe(std::string_view recipe) { return from_recipe_name(recipe); }
};

}  // namespace moxie

// Configs that are equal have equal recipes, so the recipe's text is what is hashed.
template <>
struct std::hash<moxie::MXFP8GroupedMMConfig> {
  size_t operator()(const moxie::MXFP8GroupedMMConfig& config) const {
    return std::hash<std::string>()(config.recipe());
  }
};
template <>
struct std::hash<moxie::FP8GroupedMMConfig> {
  size_t operator()(const moxie::FP8GroupedMMConfig& config) const {
    return std::hash<std::string>()(config.recipe());
  }
};
template <>
struct std::hash<moxie::MXLinearConfig> : std::hash<moxie::MXFP8GroupedMMConfig> {};
