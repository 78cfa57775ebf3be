// Both forms of w as a recipe wants them: what a weight cache holds.
#include "moxie/torch/gemm/operands.h"
#include "moxie/torch/ops.h"
#include "moxie/torch/ops/register.h"

namespace moxie::ops {
namespace {

constexpr const char* kOp = "quantize_weights";

Plan plan_of(const Tensor& w, std::string_view recipe) {
  check_float({kOp, "w", w});
  TORCH_CHECK_VALUE(w.dim() == 3, kOp, ": w must be [groups, n, k], got ", w.dim(), " dims");
  Plan plan = make_plan(recipe, w, kOp);
  TORCH_CHECK_VALUE(plan.recipe.quantizes(), kOp, ": the recipe ", recipe,
                    " quantizes nothing, so there is nothing to cache");
  return plan;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> quantize_weights_op(const Tensor& w,
                                                               std::string_view recipe) {
  return with_op(kOp, [&] {
    const Forms forms = quantize_weights(plan_of(w, recipe), w, Need::kBoth);
    return std::tuple(forms.rowwise.data, *forms.rowwise.scale, forms.colwise.data,
                      *forms.colwise.scale);
  });
}

void quantize_weights_out_op(const Tensor& w, std::string_view recipe, const Tensor& qdata,
                             const Tensor& scale, const Tensor& qdata_t, const Tensor& scale_t) {
  with_op(kOp, [&] {
    Plan plan = plan_of(w, recipe);
    plan.layout = layout_of_weights(plan, {{qdata, scale}, {qdata_t, scale_t}});
    check_out(kOp, quantized_weights_results(plan, w), {qdata, scale, qdata_t, scale_t}, {w});
    quantize_weights_into(plan, w, {{qdata, scale}, {qdata_t, scale_t}});
  });
}

}  // namespace

void register_quantize_weights(torch::Library& m) {
  m.impl("quantize_weights", TORCH_FN(quantize_weights_op));
  m.impl("quantize_weights.out", TORCH_FN(quantize_weights_out_op));
}

}  // namespace moxie::ops
