#include "moxie/torch/autograd/operands.h"

#include "moxie/torch/ops.h"
#include "moxie/torch/ops/activation.h"

namespace moxie::ops {
namespace {

// Both forms of an operand that is not quantized: bf16, unless the recipe keeps the dtype.
QuantizedForms in_high_precision(const Recipe& recipe, const Tensor& x) {
  const Tensor plain = recipe.keeps_dtype ? x : x.to(at::kBFloat16);
  return {{plain, {}}, {plain, {}}};
}

QuantizedForms as_forms(const std::vector<Tensor>& made, Need need) {
  switch (need) {
    case Need::kRowwise: return {{made[0], made[1]}, {}};
    case Need::kColwise: return {{}, {made[0], made[1]}};
    case Need::kBoth: break;
  }
  return {{made[0], made[1]}, {made[2], made[3]}};
}

bool fuses(const FormsWanted& wanted) {
  const Recipe& recipe = wanted.plan.recipe;
  return wanted.plan.fuses && (recipe.quantizes_wgrad() || wanted.need == Need::kRowwise);
}

int64_t spec_of(const FormsWanted& wanted) {
  return pack(tokens_spec(wanted.plan, wanted.role, wanted.need));
}

}  // namespace

QuantizedForms quantize_tokens(const FormsWanted& wanted, const Tensor& x) {
  const auto& [plan, offs, role, need] = wanted;
  const Recipe& recipe = plan.recipe;
  if (!recipe.quantizes()) return in_high_precision(recipe, x);
  if (recipe.quantizes_wgrad() || need == Need::kRowwise)
    return as_forms(packed::quantize(x, offs, spec_of(wanted)), need);
  QuantizedForms forms;
  if (need == Need::kBoth) forms = quantize_tokens({plan, offs, role, Need::kRowwise}, x);
  forms.colwise = {x.to(at::kBFloat16), {}};
  return forms;
}

Tensor RowActivation::forward(const Tensor& h) const {
  return weights ? weighted_swiglu(h, *weights, *slot_of, pack(activation))
                 : swiglu(h, name(activation));
}

std::tuple<Tensor, Tensor> RowActivation::backward(const Tensor& da, const Tensor& h) const {
  if (!weights) return {swiglu_backward(da, h, name(activation)), Tensor()};
  return weighted_swiglu_backward(da, h, *weights, *slot_of, pack(activation));
}

QuantizedForms quantize_swiglu(const FormsWanted& wanted, const Tensor& h,
                               const RowActivation& glu) {
  if (!fuses(wanted)) return quantize_tokens(wanted, glu.forward(h));
  const auto made = packed::swiglu_quantize(h, wanted.offs, spec_of(wanted), pack(glu.activation),
                                            glu.weights, glu.slot_of);
  return as_forms(made, wanted.need);
}

SwigluGrads quantize_swiglu_backward(const FormsWanted& wanted, const Tensor& da, const Tensor& h,
                                     const RowActivation& glu, Values values) {
  if (!fuses(wanted) || values == Values::kWanted) {
    const auto [dh, dweights] = glu.backward(da, h);
    return {quantize_tokens(wanted, dh), dweights, values == Values::kWanted ? dh : Tensor()};
  }
  const auto made = packed::swiglu_backward_quantize(
      da, h, wanted.offs, spec_of(wanted), pack(glu.activation), glu.weights, glu.slot_of);
  return {as_forms(made, wanted.need), glu.weights ? made.back() : Tensor(), {}};
}

QuantizedForms quantize_permuted(const FormsWanted& wanted, const Tensor& x,
                                 const Permutation& permutation) {
  const auto& [slot_of, row_of, top_k] = permutation;
  if (!slot_of) return quantize_tokens(wanted, x);
  if (!fuses(wanted)) return quantize_tokens(wanted, permute(x, *slot_of, *row_of, top_k));
  return as_forms(
      packed::permute_quantize(x, *slot_of, top_k, wanted.offs, spec_of(wanted), row_of),
      wanted.need);
}

QuantizedForms quantize_weights(const Plan& plan, const Tensor& w, Need need) {
  if (!plan.recipe.quantizes()) return in_high_precision(plan.recipe, w);
  return as_forms(packed::quantize(w, {}, pack(weights_spec(plan.recipe, plan.layout, need))),
                  need);
}

void check_quantized_x(const Recipe& recipe, const char* op, const MxTensor& x) {
  TORCH_CHECK_VALUE(recipe.scaling == Scaling::kBlock, op, ": x is an MXTensor in blocks of ",
                    x.block,
                    ", and this recipe has none; x.dequantize() is a plain tensor, and the recipes "
                    "mxfp8_* have blocks");
  const std::string wanted = name(recipe.activations);
  TORCH_CHECK_VALUE(x.block == wanted || (x.block == "1x128" && wanted == "1x32"), op,
                    ": x is an MXTensor in blocks of ", x.block,
                    ", and the recipe takes activations in blocks of ", wanted,
                    "; quantize it so, or take a recipe with activations=", x.block);
}

Quantized rowwise_of_quantized_x(const Plan& plan, const Quantized& x, const OptionalTensor& offs) {
  const Block block = *plan.quantized_x;
  const bool swizzles = plan.x_layout == ScaleLayout::kSwizzled;
  // token_scale() repeats each scale of a 1x128 block for four blocks of 1x32, which recipes with
  // 1x32 and the swizzled layout need.
  if (block == plan.recipe.activations && !swizzles) return x;
  const TokenScaleSpec spec{.block = block, .layout = plan.x_layout};
  return {x.data,
          packed::token_scale(*x.scale, offs, x.data.sym_size(0), x.data.sym_size(1), pack(spec))};
}

Quantized colwise_of_quantized_x(const Plan& plan, const Quantized& x, const OptionalTensor& offs) {
  const Block block = *plan.quantized_x;
  if (!plan.recipe.quantizes_wgrad()) {
    const TokenScaleSpec spec{.block = block, .layout = ScaleLayout::kPlain};
    return {packed::dequantize_tokens(x.data, *x.scale, pack(spec)), {}};
  }
  const RequantizeSpec spec{.block = block,
                            .from_layout = ScaleLayout::kPlain,
                            .colwise = plan.recipe.wgrad_x,
                            .rule = plan.recipe.rule,
                            .layout = plan.layout};
  const auto made = packed::requantize(x.data, *x.scale, offs, pack(spec));
  return {made[0], made[1]};
}

}  // namespace moxie::ops
