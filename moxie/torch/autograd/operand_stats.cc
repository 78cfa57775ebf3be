#include "moxie/torch/autograd/operand_stats.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/stack.h>

#include "moxie/torch/recipe.h"

namespace moxie::ops {
namespace {

Tensor stats_of(const Tensor& operand, const std::optional<Tensor>& offs, std::string_view recipe,
                std::string_view part) {
  return quantization_stats(operand, {.offs = offs, .recipe = recipe, .part = part});
}

}  // namespace

Tensor stats_of_forward(const ForwardParts& parts, const std::optional<Tensor>& offs,
                        std::string_view text) {
  const at::NoGradGuard no_grad;
  const Recipe recipe = parse_recipe(text, "grouped_mm");
  const Tensor w = stats_of(parts.w, {}, text, "w");
  // If both forms of w have the same blocks, their errors are equal, so w is measured once.
  const bool same = recipe.scaling == Scaling::kBlock && recipe.weights == recipe.weights_t();
  return at::stack({stats_of(parts.x, offs, text, "x"), w, stats_of(parts.x_t, offs, text, "x_t"),
                    same ? w : stats_of(parts.w, {}, text, "w_t")});
}

Tensor stats_of_gradient(const Tensor& dy, const std::optional<Tensor>& offs,
                         std::string_view recipe) {
  const at::NoGradGuard no_grad;
  return at::stack({stats_of(dy, offs, recipe, "dy"), stats_of(dy, offs, recipe, "dy_t")});
}

}  // namespace moxie::ops
