// Recipes and paths for Python, the command line and tests.
#include "moxie/torch/recipe.h"

#include <torch/library.h>

#include "moxie/torch/gemm/path.h"
#include "moxie/torch/view.h"

namespace moxie::ops {
namespace {

std::string recipe_text(std::string_view text) {
  return with_op("recipe", [&] { return to_text(parse_recipe(text, "recipe")); });
}

std::tuple<std::string, std::string> path_of(std::string_view recipe, c10::Device device, int64_t n,
                                             int64_t k) {
  return with_op("path", [&] {
    const Choice choice = choose_path(parse_recipe(recipe, "path"), device, n, k);
    return std::tuple(std::string(name(choice.path)), choice.reason);
  });
}

void force_path_op(std::string_view path, bool gpus_only) {
  with_op("force_path",
          [&] { force_path(path, gpus_only ? ForceOn::kGpus : ForceOn::kEveryDevice); });
}

}  // namespace

TORCH_LIBRARY_IMPL(moxie, CompositeExplicitAutograd, m) {
  m.impl("_recipe", TORCH_FN(recipe_text));
  m.impl("_recipe_names", TORCH_FN(recipe_names));
  m.impl("_path", TORCH_FN(path_of));
  m.impl("_force_path", TORCH_FN(force_path_op));
}

}  // namespace moxie::ops
