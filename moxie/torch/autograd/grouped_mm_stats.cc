// grouped_mm that adds up what quantization loses of its operands (stats.h): forward those of x and
// w, backward those of dy. It is made of other ops, so every device, autograd and torch.compile
// take it as they take those.
#include <ATen/ops/stack.h>
#include <torch/library.h>

#include "moxie/torch/autograd/node.h"
#include "moxie/torch/recipe.h"
#include "moxie/torch/stats.h"

namespace moxie::ops {
namespace {

constexpr const char* kOp = "grouped_mm";
constexpr int64_t kForwardParts = 4;  // of kStatsParts; those of dy follow

void check_stats(const Tensor& stats, const Tensor& x) {
  const Input input{kOp, "stats", stats};
  TORCH_CHECK_TYPE(stats.scalar_type() == at::kDouble, kOp, ": stats must be torch.float64, got ",
                   dtype_name(stats.scalar_type()));
  check_shape(input, {kNumStatsParts, kNumStats});
  check_device(input, x);
}

Tensor of_forward(const Tensor& x, const Tensor& w, const OptionalTensor& offs,
                  std::string_view text) {
  const at::NoGradGuard no_grad;
  const auto of_x = [&](std::string_view part) {
    return quantization_stats(x, {.offs = offs, .recipe = text, .part = part});
  };
  const auto of_w = [&](std::string_view part) {
    return quantization_stats(w, {.recipe = text, .part = part});
  };
  const Recipe recipe = parse_recipe(text, kOp);
  const Tensor w_rowwise = of_w("w");
  // The same blocks hold the same elements, whichever way they are stored.
  const bool same = recipe.scaling == Scaling::kBlock && recipe.weights == recipe.weights_t();
  return at::stack({of_x("x"), w_rowwise, of_x("x_t"), same ? w_rowwise : of_w("w_t")});
}

Tensor of_gradient(const Tensor& dy, const OptionalTensor& offs, std::string_view recipe) {
  const at::NoGradGuard no_grad;
  return at::stack({quantization_stats(dy, {.offs = offs, .recipe = recipe, .part = "dy"}),
                    quantization_stats(dy, {.offs = offs, .recipe = recipe, .part = "dy_t"})});
}

Tensor multiply(const Tensor& x, const Tensor& w, const Tensor& stats, const OptionalTensor& offs,
                std::string_view recipe, const OptionalTensor& bias,
                std::optional<at::ScalarType> dtype, OptionalTensors quantized_w,
                const OptionalTensor& main_grad) {
  return with_op(kOp, [&] {
    check_stats(stats, x);
    const Tensor y = ops::grouped_mm(
        x, w, grouped_mm_options(offs, recipe, bias, dtype, quantized_w, main_grad));
    add_once_(stats.narrow(0, 0, kForwardParts), of_forward(x, w, offs, recipe));
    if (y.requires_grad())
      y.register_hook([stats, offs, recipe = std::string(recipe)](const Tensor& dy) {
        const at::NoGradGuard no_grad;
        stats.narrow(0, kForwardParts, kNumStatsParts - kForwardParts)
            .add_(of_gradient(dy, offs, recipe));
      });
    return y;
  });
}

}  // namespace

TORCH_LIBRARY_IMPL(moxie, CompositeImplicitAutograd, m) {
  m.impl("grouped_mm.stats", TORCH_FN(multiply));
}

}  // namespace moxie::ops
