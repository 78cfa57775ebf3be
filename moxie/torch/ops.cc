#include "moxie/torch/ops.h"

#include "moxie/torch/dispatch.h"

namespace moxie::ops {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<at::Tensor>;
using Text = std::string_view;
using Two = std::tuple<Tensor, Tensor>;
using Three = std::tuple<Tensor, Tensor, Tensor>;
using Four = std::tuple<Tensor, Tensor, Tensor, Tensor>;

}  // namespace

Two quantize_rowwise(const Tensor& x, const QuantizeOptions& options) {
  return dispatch<"moxie::quantize_rowwise", Two>(x, options.offs, options.rowwise_block,
                                                  options.rule, options.scale_layout);
}

Two quantize_colwise(const Tensor& x, const QuantizeOptions& options) {
  return dispatch<"moxie::quantize_colwise", Two>(x, options.offs, options.colwise_block,
                                                  options.rule, options.scale_layout);
}

Four quantize_both(const Tensor& x, const QuantizeOptions& options) {
  return dispatch<"moxie::quantize_both", Four>(x, options.offs, options.rowwise_block,
                                                options.colwise_block, options.rule,
                                                options.scale_layout);
}

void quantize_both_out(const Tensor& x, const QuantizeOptions& options, const Tensor& qdata,
                       const Tensor& scale, const Tensor& qdata_t, const Tensor& scale_t) {
  dispatch<"moxie::quantize_both.out", void>(x, options.offs, options.rowwise_block,
                                             options.colwise_block, options.rule,
                                             options.scale_layout, qdata, scale, qdata_t, scale_t);
}

Two requantize(const Tensor& qdata, const Tensor& scale, const RequantizeOptions& options) {
  return dispatch<"moxie::requantize", Two>(qdata, scale, options.offs, options.block,
                                            options.colwise_block, options.rule,
                                            options.scale_layout, options.from_layout);
}

Tensor dequantize_rowwise(const Tensor& qdata, const Tensor& scale,
                          const DequantizeOptions& options) {
  return dispatch<"moxie::dequantize_rowwise", Tensor>(
      qdata, scale, options.offs, options.block.value_or("1x32"), std::optional(options.dtype),
      options.scale_layout);
}

Tensor dequantize_colwise(const Tensor& qdata_t, const Tensor& scale_t, const c10::SymInt& num_rows,
                          const DequantizeOptions& options) {
  return dispatch<"moxie::dequantize_colwise", Tensor>(
      qdata_t, scale_t, num_rows, options.offs, options.block.value_or("32x1"),
      std::optional(options.dtype), options.scale_layout);
}

Two quantize_per_row(const Tensor& x, const OptionalTensor& offs) {
  return dispatch<"moxie::quantize_per_row", Two>(x, offs);
}

Two quantize_per_col(const Tensor& x, const OptionalTensor& offs) {
  return dispatch<"moxie::quantize_per_col", Two>(x, offs);
}

void quantize_per_row_out(const Tensor& x, const OptionalTensor& offs, const Tensor& qdata,
                          const Tensor& scale) {
  dispatch<"moxie::quantize_per_row.out", void>(x, offs, qdata, scale);
}

void quantize_per_col_out(const Tensor& x, const OptionalTensor& offs, const Tensor& qdata_t,
                          const Tensor& scale_t) {
  dispatch<"moxie::quantize_per_col.out", void>(x, offs, qdata_t, scale_t);
}

Tensor swizzle_scale(const Tensor& scale, const OptionalTensor& offs, Text form) {
  return dispatch<"moxie::swizzle_scale", Tensor>(scale, offs, form);
}

Tensor unswizzle_scale(const Tensor& swizzled, const c10::SymInt& rows, const c10::SymInt& cols,
                       const OptionalTensor& offs, Text form) {
  return dispatch<"moxie::unswizzle_scale", Tensor>(swizzled, rows, cols, offs, form);
}

Tensor replicate_scale(const Tensor& scale, const c10::SymInt& outer, const c10::SymInt& k,
                       Text block, Text form) {
  return dispatch<"moxie::replicate_scale", Tensor>(scale, outer, k, block, form);
}

Tensor compact_scale(const Tensor& scale, Text block, Text form) {
  return dispatch<"moxie::compact_scale", Tensor>(scale, block, form);
}

Three pad_groups(const Tensor& x, const Tensor& offs, int64_t alignment) {
  return dispatch<"moxie::pad_groups", Three>(x, offs, alignment);
}

Tensor unpad_groups(const Tensor& padded, const Tensor& offs, const Tensor& starts,
                    const c10::SymInt& num_rows) {
  return dispatch<"moxie::unpad_groups", Tensor>(padded, offs, starts, num_rows);
}

Tensor padded_offs(const Tensor& offs, int64_t alignment) {
  return dispatch<"moxie::padded_offs", Tensor>(offs, alignment);
}

Tensor grouped_mm(const Tensor& x, const Tensor& w, const GroupedMmOptions& options) {
  if (options.stats) {
    return dispatch<"moxie::grouped_mm.stats", Tensor>(x, w, *options.stats, options.offs,
                                                       options.recipe, options.bias, options.dtype,
                                                       options.quantized_w, options.main_grad);
  }
  return dispatch<"moxie::grouped_mm", Tensor>(x, w, options.offs, options.recipe, options.bias,
                                               options.dtype, options.quantized_w,
                                               options.main_grad);
}

Tensor expert_mlp(const Tensor& x, const Tensor& w13, const Tensor& w2,
                  const ExpertMlpOptions& options) {
  const auto& [slot_of, row_of, top_k] = options.permutation;
  return dispatch<"moxie::expert_mlp", Tensor>(
      x, w13, w2, options.offs, options.recipe, options.quantized_w13, options.quantized_w2,
      options.main_grad13, options.main_grad2, slot_of, row_of, top_k, options.x_dtype);
}

Tensor gate_logits(const Tensor& x, const Tensor& weight) {
  return dispatch<"moxie::gate_logits", Tensor>(x, weight);
}

Tensor top_k(const Tensor& scores, int64_t k) {
  return dispatch<"moxie::top_k", Tensor>(scores, k);
}

Three route(const Tensor& ids, int64_t num_experts) {
  return dispatch<"moxie::route", Three>(ids, num_experts);
}

Tensor permute(const Tensor& x, const Tensor& slot_of, const Tensor& row_of, int64_t top_k,
               const OptionalTensor& weights) {
  return dispatch<"moxie::permute", Tensor>(x, slot_of, row_of, top_k, weights);
}

Tensor unpermute(const Tensor& rows, const Tensor& slot_of, const Tensor& row_of,
                 const c10::SymInt& num_tokens, const OptionalTensor& weights) {
  return dispatch<"moxie::unpermute", Tensor>(rows, slot_of, row_of, num_tokens, weights);
}

Tensor unpermute_weights(const Tensor& dout, const Tensor& rows, const Tensor& row_of,
                         const c10::SymInt& top_k) {
  return dispatch<"moxie::unpermute_weights", Tensor>(dout, rows, row_of, top_k);
}

Tensor swiglu(const Tensor& h) { return dispatch<"moxie::swiglu", Tensor>(h); }

Tensor swiglu_backward(const Tensor& da, const Tensor& h) {
  return dispatch<"moxie::swiglu_backward", Tensor>(da, h);
}

Two swiglu_quantize_rowwise(const Tensor& h, const QuantizeOptions& options) {
  return dispatch<"moxie::swiglu_quantize_rowwise", Two>(h, options.offs, options.rowwise_block,
                                                         options.rule, options.scale_layout);
}

Four swiglu_quantize_both(const Tensor& h, const QuantizeOptions& options) {
  return dispatch<"moxie::swiglu_quantize_both", Four>(h, options.offs, options.rowwise_block,
                                                       options.colwise_block, options.rule,
                                                       options.scale_layout);
}

Four swiglu_backward_quantize_both(const Tensor& da, const Tensor& h,
                                   const QuantizeOptions& options) {
  return dispatch<"moxie::swiglu_backward_quantize_both", Four>(
      da, h, options.offs, options.rowwise_block, options.colwise_block, options.rule,
      options.scale_layout);
}

Two permute_quantize_rowwise(const Tensor& x, const Tensor& slot_of, int64_t top_k,
                             const QuantizeOptions& options) {
  return dispatch<"moxie::permute_quantize_rowwise", Two>(
      x, slot_of, top_k, options.offs, options.rowwise_block, options.rule, options.scale_layout);
}

Four permute_quantize_both(const Tensor& x, const Tensor& slot_of, int64_t top_k,
                           const QuantizeOptions& options) {
  return dispatch<"moxie::permute_quantize_both", Four>(
      x, slot_of, top_k, options.offs, options.rowwise_block, options.colwise_block, options.rule,
      options.scale_layout);
}

Tensor sum_groups(const Tensor& x, const OptionalTensor& offs) {
  return dispatch<"moxie::sum_groups", Tensor>(x, offs);
}

Tensor quantization_stats(const Tensor& x, const StatsOptions& options) {
  return dispatch<"moxie::quantization_stats", Tensor>(x, options.offs, options.recipe,
                                                       options.part);
}

void add_once_(const Tensor& total, const Tensor& addend) {
  dispatch<"moxie::_add_once_", void>(total, addend);
}

Tensor grouped_fwd(const Tensor& x, const OptionalTensor& x_scale, const Tensor& w,
                   const OptionalTensor& w_scale, const GemmOptions& options) {
  return dispatch<"moxie::grouped_fwd", Tensor>(x, x_scale, w, w_scale, options.offs,
                                                options.recipe, options.bias, options.dtype,
                                                options.scale_layout);
}

Tensor grouped_dgrad(const Tensor& dy, const OptionalTensor& dy_scale, const Tensor& w_t,
                     const OptionalTensor& w_scale_t, const GemmOptions& options) {
  return dispatch<"moxie::grouped_dgrad", Tensor>(dy, dy_scale, w_t, w_scale_t, options.offs,
                                                  options.recipe, options.dtype,
                                                  options.scale_layout);
}

Tensor grouped_wgrad(const Tensor& dy_t, const OptionalTensor& dy_scale_t, const Tensor& x_t,
                     const OptionalTensor& x_scale_t, const c10::SymInt& num_rows,
                     const GemmOptions& options) {
  return dispatch<"moxie::grouped_wgrad", Tensor>(dy_t, dy_scale_t, x_t, x_scale_t, num_rows,
                                                  options.offs, options.recipe, options.dtype,
                                                  options.scale_layout);
}

void grouped_wgrad_add_(const Tensor& dw, const Tensor& dy_t, const OptionalTensor& dy_scale_t,
                        const Tensor& x_t, const OptionalTensor& x_scale_t,
                        const c10::SymInt& num_rows, const GemmOptions& options) {
  dispatch<"moxie::grouped_wgrad_add_", void>(dw, dy_t, dy_scale_t, x_t, x_scale_t, num_rows,
                                              options.offs, options.recipe, options.scale_layout);
}

Four quantize_weights(const Tensor& w, Text recipe) {
  return dispatch<"moxie::quantize_weights", Four>(w, recipe);
}

void quantize_weights_out(const Tensor& w, Text recipe, const Tensor& qdata, const Tensor& scale,
                          const Tensor& qdata_t, const Tensor& scale_t) {
  dispatch<"moxie::quantize_weights.out", void>(w, recipe, qdata, scale, qdata_t, scale_t);
}

}  // namespace moxie::ops
