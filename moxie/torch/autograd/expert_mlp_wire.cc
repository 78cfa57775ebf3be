#include "moxie/torch/autograd/expert_mlp_wire.h"

#include <ATen/ops/empty.h>

#include "moxie/torch/ops.h"
#include "moxie/torch/ops/requantize.h"

namespace moxie::ops::mlp {
namespace {

Quantized rowwise_of_received(const Plan& plan, const Quantized& rows, const OptionalTensor& offs) {
  if (layout_of_received(plan) == ScaleLayout::kPlain) return rows;
  const TokenScaleSpec spec{.block = plan.recipe.activations, .layout = ScaleLayout::kSwizzled};
  return {rows.data, packed::token_scale(*rows.scale, offs, rows.data.sym_size(0),
                                         rows.data.sym_size(1), pack(spec))};
}

RequantizeSpec requantize_spec(const Plan& plan, Role role) {
  const Recipe& recipe = plan.recipe;
  return {.block = recipe.activations,
          .from_layout = ScaleLayout::kPlain,
          .colwise = role == Role::kX ? recipe.wgrad_x : recipe.wgrad_dy,
          .rule = recipe.rule,
          .layout = plan.layout};
}

Quantized colwise_of_rows(const FormsWanted& wanted, const Quantized& rows) {
  const auto made = packed::requantize(rows.data, *rows.scale, wanted.offs,
                                       pack(requantize_spec(wanted.plan, wanted.role)));
  return {made[0], made[1]};
}

}  // namespace

Wire parse_wire(std::string_view text, const Recipe& recipe) {
  if (text == "unquantized") return Wire::kUnquantized;
  TORCH_CHECK_VALUE(text == "fp8", kOp, ": wire must be 'fp8' or 'unquantized', got '", text, "'");
  TORCH_CHECK_VALUE(
      recipe.scaling == Scaling::kBlock && recipe.quantizes_wgrad() && recipe.activations.rows == 1,
      kOp, ": wire 'fp8' takes recipes that quantize all three passes in blocks, got ",
      to_text(recipe), "; wire 'unquantized' takes every recipe");
  return Wire::kFp8;
}

ScaleLayout layout_of_received(const Plan& plan) {
  return plan.layout == ScaleLayout::kSwizzled ? ScaleLayout::kSwizzled : ScaleLayout::kPlain;
}

Quantized for_wire(const Plan& plan, Wire wire, Role role, const Tensor& tokens) {
  if (wire == Wire::kUnquantized) return {tokens, {}};
  QuantizeSpec spec = tokens_spec(plan, role, Need::kRowwise);
  spec.layout = ScaleLayout::kPlain;
  const auto made = packed::quantize(tokens, {}, pack(spec));
  return {made[0], made[1]};
}

std::optional<Quantized> colwise_of_received(const FormsWanted& wanted, const ReceivedRows& rows) {
  const Tensor& index = *rows.data.index;
  if (index.is_cpu()) return std::nullopt;
  const Tensor scale =
      at::empty({index.size(0), rows.scale_columns}, index.options().dtype(at::kFloat8_e8m0fnu));
  copy_rows({{index.size(0), rows.scale_columns, rows.scale, rows_of_matrix(scale)}});
  return requantize_apart({const_rows_in(rows.data), index.size(0), rows.columns, scale},
                          wanted.offs, requantize_spec(wanted.plan, wanted.role));
}

QuantizedForms forms_of_received(const FormsWanted& wanted, const Quantized& rows) {
  if (!rows.scale) return quantize_tokens(wanted, rows.data);
  QuantizedForms forms;
  if (wanted.need != Need::kColwise)
    forms.rowwise = rowwise_of_received(wanted.plan, rows, wanted.offs);
  if (wanted.need != Need::kRowwise) forms.colwise = colwise_of_rows(wanted, rows);
  return forms;
}

}  // namespace moxie::ops::mlp
