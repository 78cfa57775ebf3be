// Gives recipes to the modules of a model by name:
//
//   const auto report = moxie::quantize(*model, {{"re:.*experts", "mxfp8_rceil_128"},
//                                                {"head", std::nullopt}});
//
// A key is the exact name of a module, or "re:" and an extended regular expression that must match
// a whole name. An exact name wins over a pattern, an earlier pattern over a later one, and nullopt
// leaves a module as it is. A key that matches nothing is an error, and then nothing has been
// changed.
//
// Only Moxie's own modules (MxLinear, GroupedExperts) can take a recipe. A torch::nn::Linear is
// held by its owner as that type, so no other module can be put in its place: a key that names one
// is refused.
#pragma once

#include <torch/nn/module.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "moxie/torch/config.h"

namespace moxie {

// A recipe's text, which leaves the module's weight cache as it is, or a config (config.h), which
// decides about that too.
struct ModuleRecipe {
  ModuleRecipe(std::string text) : recipe(std::move(text)) {}
  ModuleRecipe(const char* text) : recipe(text) {}
  ModuleRecipe(const MXFP8GroupedMMConfig& config)
      : recipe(config.recipe()), weight_cache(config.weight_cache) {}
  ModuleRecipe(const FP8GroupedMMConfig& config)
      : recipe(config.recipe()), weight_cache(config.weight_cache) {}

  std::string recipe;
  std::optional<bool> weight_cache = std::nullopt;
};

using NameToRecipe = std::vector<std::pair<std::string, std::optional<ModuleRecipe>>>;

struct Converted {
  std::string name;    // of the module
  std::string recipe;  // that it has now
};

std::vector<Converted> quantize(torch::nn::Module& model, const NameToRecipe& recipes);

// Quantizes every cached weight of the model again: after each step of an optimizer.
void refresh(torch::nn::Module& model);

}  // namespace moxie
