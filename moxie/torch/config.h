// Configs with the names and fields that people know from torchao; each stands for a recipe. Python
// has the same ones.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "moxie/torch/recipe.h"

namespace moxie {

using KernelPreference = ops::Kernels;
using ScaleCalculationMode = ScaleRule;

struct MXFP8GroupedMMConfig {
  KernelPreference kernel_preference = KernelPreference::kAuto;
  std::optional<at::ScalarType> out_dtype = std::nullopt;  // that of the activations
  bool wgrad_with_hp = false;
  ScaleCalculationMode scale_calculation_mode = ScaleCalculationMode::kRceil;
  bool pad_token_groups_for_grouped_mm = false;  // accepted, without effect: nothing is padded
  Block activations = {1, 32}, weights = {1, 32}, wgrad_dy = {32, 1}, wgrad_x = {32, 1};

  bool operator==(const MXFP8GroupedMMConfig&) const = default;

  static MXFP8GroupedMMConfig from_recipe(std::string_view name);
  // The text that ops and modules take. Throws where the fields do not go together.
  std::string recipe() const;
};

struct FP8GroupedMMConfig {
  std::optional<at::ScalarType> out_dtype = std::nullopt;
  bool wgrad_with_hp = false;
  bool pad_token_groups_for_grouped_mm = false;

  bool operator==(const FP8GroupedMMConfig&) const = default;

  static FP8GroupedMMConfig from_recipe(std::string_view name);
  std::string recipe() const;
};

// A linear's fields are those of the experts' config; the names of its recipes are torchao's or
// ours.
struct MXLinearConfig : MXFP8GroupedMMConfig {
  static MXLinearConfig from_recipe_name(std::string_view name);
};

}  // namespace moxie
