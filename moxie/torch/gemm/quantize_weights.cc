// The op quantize_weights: quantizes w to both forms in the blocks of a recipe. They are what a
// weight cache holds.
#include "moxie/torch/ops/register.h"
#include "moxie/torch/plan/specs.h"

namespace moxie::ops {
namespace {

constexpr const char* kOp = "quantize_weights";
using Four = std::tuple<Tensor, Tensor, Tensor, Tensor>;

Recipe checked_recipe(const Tensor& w, std::string_view text) {
  check_float({kOp, "w", w});
  TORCH_CHECK_VALUE(w.dim() == 3, kOp, ": w must be [groups, n, k], got ", w.dim(), " dims");
  const Recipe recipe = parse_recipe(text, kOp);
  TORCH_CHECK_VALUE(recipe.quantizes(), kOp, ": the recipe ", text,
                    " quantizes nothing, so there is nothing to cache");
  return recipe;
}

// The scales have the layout that suits the device of w.
Four quantize_weights(const Tensor& w, std::string_view text) {
  return with_op(kOp, [&] {
    const Recipe recipe = checked_recipe(w, text);
    const auto layout = layout_for(recipe, device_behind(w), w.sym_size(1), w.sym_size(2));
    return four(quantize(kOp, w, {}, weights_spec(recipe, layout, Need::kBoth)));
  });
}

// The scales keep the layout of the given tensors, if the device can read it.
void quantize_weights_out(const Tensor& w, std::string_view text, const Tensor& qdata,
                          const Tensor& scale, const Tensor& qdata_t, const Tensor& scale_t) {
  with_op(kOp, [&] {
    const Recipe recipe = checked_recipe(w, text);
    const Kernel forward = choose_kernel({.recipe = recipe,
                                          .device = device_behind(w),
                                          .rows = 1,
                                          .groups = w.sym_size(0),
                                          .n = w.sym_size(1),
                                          .k = w.sym_size(2)},
                                         Pass::kForward, OperandDtype::kFp8);
    const auto layout = layout_by_shape(recipe, forward, {qdata, scale, qdata_t, scale_t});
    quantize_into(kOp, w, {}, weights_spec(recipe, layout, Need::kBoth),
                  {qdata, scale, qdata_t, scale_t});
  });
}

void register_ops(torch::Library& m) {
  m.impl("quantize_weights", TORCH_FN(quantize_weights));
  m.impl("quantize_weights.out", TORCH_FN(quantize_weights_out));
}

}  // namespace

MOXIE_REGISTER_OPS(register_ops)

}  // namespace moxie::ops
