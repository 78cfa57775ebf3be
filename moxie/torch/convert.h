// Gives recipes to the modules of a model by name:
//
//   const auto report = moxie::quantize(*model, {{"re:.*experts", "mxfp8_rceil_128"},
//                                                {"head", std::nullopt}});
//
// A key is the exact name of a module, or "re:" and an extended regular expression that must match
// a whole name. An exact name wins over a pattern, an earlier pattern over a later one, and nullopt
// leaves a module as it is. If a key matches no module, quantize() throws and changes nothing.
//
// Only Moxie's own modules (MxLinear, GroupedExperts) can take a recipe. The owner of a
// torch::nn::Linear holds it by that type, so it cannot be replaced by another module: a key that
// names one is refused.
#pragma once

#include <torch/nn/module.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace moxie {

struct ModuleRecipe {
  ModuleRecipe(std::string text, std::optional<bool> cached = std::nullopt)
      : recipe(std::move(text)), weight_cache(cached) {}
  ModuleRecipe(const char* text, std::optional<bool> cached = std::nullopt)
      : recipe(text), weight_cache(cached) {}

  std::string recipe;
  std::optional<bool> weight_cache;  // absent: unchanged
};

using NameToRecipe = std::vector<std::pair<std::string, std::optional<ModuleRecipe>>>;

struct Converted {
  std::string name;    // of the module
  std::string recipe;  // the recipe it has now
};

std::vector<Converted> quantize(torch::nn::Module& model, const NameToRecipe& recipes);

// Requantizes every cached weight of the model; call it after each optimizer step.
void refresh(torch::nn::Module& model);

}  // namespace moxie
