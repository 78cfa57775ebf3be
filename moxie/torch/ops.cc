#include "moxie/torch/ops.h"

#include <ATen/core/dispatch/Dispatcher.h>

#include "moxie/torch/mx_tensor.h"

namespace moxie::ops {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<at::Tensor>;
using Text = std::string_view;
using OptionalDtype = std::optional<at::ScalarType>;
using OptionalText = std::optional<Text>;
using Two = std::tuple<Tensor, Tensor>;
using Three = std::tuple<Tensor, Tensor, Tensor>;
using Four = std::tuple<Tensor, Tensor, Tensor, Tensor>;

template <class Signature>
auto find(const char* name, const char* overload = "") {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, overload).typed<Signature>();
}

}  // namespace

Two quantize_rowwise(const Tensor& x, const QuantizeOptions& options) {
  static const auto op =
      find<Two(const Tensor&, const OptionalTensor&, Text, Text, Text)>("moxie::quantize_rowwise");
  return op.call(x, options.offs, options.rowwise_block, options.rule, options.scale_layout);
}

Two quantize_colwise(const Tensor& x, const QuantizeOptions& options) {
  static const auto op =
      find<Two(const Tensor&, const OptionalTensor&, Text, Text, Text)>("moxie::quantize_colwise");
  return op.call(x, options.offs, options.colwise_block, options.rule, options.scale_layout);
}

Four quantize_both(const Tensor& x, const QuantizeOptions& options) {
  static const auto op = find<Four(const Tensor&, const OptionalTensor&, Text, Text, Text, Text)>(
      "moxie::quantize_both");
  return op.call(x, options.offs, options.rowwise_block, options.colwise_block, options.rule,
                 options.scale_layout);
}

void quantize_both_out(const Tensor& x, const QuantizeOptions& options, const Tensor& qdata,
                       const Tensor& scale, const Tensor& qdata_t, const Tensor& scale_t) {
  static const auto op =
      find<void(const Tensor&, const OptionalTensor&, Text, Text, Text, Text, const Tensor&,
                const Tensor&, const Tensor&, const Tensor&)>("moxie::quantize_both", "out");
  op.call(x, options.offs, options.rowwise_block, options.colwise_block, options.rule,
          options.scale_layout, qdata, scale, qdata_t, scale_t);
}

Two requantize(const Tensor& qdata, const Tensor& scale, const RequantizeOptions& options) {
  static const auto op =
      find<Two(const Tensor&, const Tensor&, const OptionalTensor&, Text, Text, Text, Text, Text)>(
          "moxie::requantize");
  return op.call(qdata, scale, options.offs, options.block, options.colwise_block, options.rule,
                 options.scale_layout, options.from_layout);
}

Tensor dequantize_rowwise(const Tensor& qdata, const Tensor& scale,
                          const DequantizeOptions& options) {
  static const auto op =
      find<Tensor(const Tensor&, const Tensor&, const OptionalTensor&, Text, OptionalDtype, Text)>(
          "moxie::dequantize_rowwise");
  return op.call(qdata, scale, options.offs, options.block.value_or("1x32"), options.dtype,
                 options.scale_layout);
}

Tensor dequantize_colwise(const Tensor& qdata_t, const Tensor& scale_t, const c10::SymInt& num_rows,
                          const DequantizeOptions& options) {
  static const auto op =
      find<Tensor(const Tensor&, const Tensor&, c10::SymInt, const OptionalTensor&, Text,
                  OptionalDtype, Text)>("moxie::dequantize_colwise");
  return op.call(qdata_t, scale_t, num_rows, options.offs, options.block.value_or("32x1"),
                 options.dtype, options.scale_layout);
}

Two quantize_per_row(const Tensor& x, const OptionalTensor& offs) {
  static const auto op = find<Two(const Tensor&, const OptionalTensor&)>("moxie::quantize_per_row");
  return op.call(x, offs);
}

Two quantize_per_col(const Tensor& x, const OptionalTensor& offs) {
  static const auto op = find<Two(const Tensor&, const OptionalTensor&)>("moxie::quantize_per_col");
  return op.call(x, offs);
}

void quantize_per_row_out(const Tensor& x, const OptionalTensor& offs, const Tensor& qdata,
                          const Tensor& scale) {
  static const auto op =
      find<void(const Tensor&, const OptionalTensor&, const Tensor&, const Tensor&)>(
          "moxie::quantize_per_row", "out");
  op.call(x, offs, qdata, scale);
}

void quantize_per_col_out(const Tensor& x, const OptionalTensor& offs, const Tensor& qdata_t,
                          const Tensor& scale_t) {
  static const auto op =
      find<void(const Tensor&, const OptionalTensor&, const Tensor&, const Tensor&)>(
          "moxie::quantize_per_col", "out");
  op.call(x, offs, qdata_t, scale_t);
}

Tensor swizzle_scale(const Tensor& scale, const OptionalTensor& offs, Text form) {
  static const auto op =
      find<Tensor(const Tensor&, const OptionalTensor&, Text)>("moxie::swizzle_scale");
  return op.call(scale, offs, form);
}

Tensor unswizzle_scale(const Tensor& swizzled, const c10::SymInt& rows, const c10::SymInt& cols,
                       const OptionalTensor& offs, Text form) {
  static const auto op =
      find<Tensor(const Tensor&, c10::SymInt, c10::SymInt, const OptionalTensor&, Text)>(
          "moxie::unswizzle_scale");
  return op.call(swizzled, rows, cols, offs, form);
}

Tensor replicate_scale(const Tensor& scale, const c10::SymInt& outer, const c10::SymInt& k,
                       Text block, Text form) {
  static const auto op =
      find<Tensor(const Tensor&, c10::SymInt, c10::SymInt, Text, Text)>("moxie::replicate_scale");
  return op.call(scale, outer, k, block, form);
}

Tensor compact_scale(const Tensor& scale, Text block, Text form) {
  static const auto op = find<Tensor(const Tensor&, Text, Text)>("moxie::compact_scale");
  return op.call(scale, block, form);
}

Three pad_groups(const Tensor& x, const Tensor& offs, int64_t alignment) {
  static const auto op = find<Three(const Tensor&, const Tensor&, int64_t)>("moxie::pad_groups");
  return op.call(x, offs, alignment);
}

Tensor unpad_groups(const Tensor& padded, const Tensor& offs, const Tensor& starts,
                    const c10::SymInt& num_rows) {
  static const auto op =
      find<Tensor(const Tensor&, const Tensor&, const Tensor&, c10::SymInt)>("moxie::unpad_groups");
  return op.call(padded, offs, starts, num_rows);
}

Tensor padded_offs(const Tensor& offs, int64_t alignment) {
  static const auto op = find<Tensor(const Tensor&, int64_t)>("moxie::padded_offs");
  return op.call(offs, alignment);
}

Tensor grouped_mm(const Tensor& x, const Tensor& w, const GroupedMmOptions& options) {
  if (options.stats) {
    static const auto with_stats =
        find<Tensor(const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&, Text,
                    const OptionalTensor&, OptionalDtype, std::optional<at::ArrayRef<Tensor>>,
                    const OptionalTensor&)>("moxie::grouped_mm", "stats");
    return with_stats.call(x, w, *options.stats, options.offs, options.recipe, options.bias,
                           options.dtype, options.quantized_w, options.main_grad);
  }
  static const auto op =
      find<Tensor(const Tensor&, const Tensor&, const OptionalTensor&, Text, const OptionalTensor&,
                  OptionalDtype, std::optional<at::ArrayRef<Tensor>>, const OptionalTensor&)>(
          "moxie::grouped_mm");
  return op.call(x, w, options.offs, options.recipe, options.bias, options.dtype,
                 options.quantized_w, options.main_grad);
}

Tensor grouped_mm(const MxTensor& x, const Tensor& w, const GroupedMmOptions& options) {
  TORCH_CHECK_VALUE(!options.stats,
                    "grouped_mm: stats need x before it was quantized, and x is an MxTensor");
  static const auto op =
      find<Tensor(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&,
                  Text, Text, const OptionalTensor&, OptionalDtype,
                  std::optional<at::ArrayRef<Tensor>>, const OptionalTensor&)>("moxie::grouped_mm",
                                                                               "mx");
  return op.call(x.proxy, x.qdata, x.scale, w, options.offs, x.block, options.recipe, options.bias,
                 options.dtype, options.quantized_w, options.main_grad);
}

Tensor expert_mlp(const Tensor& x, const Tensor& w13, const Tensor& w2,
                  const ExpertMlpOptions& options) {
  static const auto op =
      find<Tensor(const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&, Text,
                  std::optional<at::ArrayRef<Tensor>>, std::optional<at::ArrayRef<Tensor>>,
                  const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
                  const OptionalTensor&, int64_t, std::optional<at::ScalarType>)>(
          "moxie::expert_mlp");
  const auto& [slot_of, row_of, top_k] = options.permutation;
  return op.call(x, w13, w2, options.offs, options.recipe, options.quantized_w13,
                 options.quantized_w2, options.main_grad13, options.main_grad2, slot_of, row_of,
                 top_k, options.x_dtype);
}

Tensor gate_logits(const Tensor& x, const Tensor& weight) {
  static const auto op = find<Tensor(const Tensor&, const Tensor&)>("moxie::gate_logits");
  return op.call(x, weight);
}

Tensor top_k(const Tensor& scores, int64_t k) {
  static const auto op = find<Tensor(const Tensor&, int64_t)>("moxie::top_k");
  return op.call(scores, k);
}

Three route(const Tensor& ids, int64_t num_experts) {
  static const auto op = find<Three(const Tensor&, int64_t)>("moxie::route");
  return op.call(ids, num_experts);
}

Tensor permute(const Tensor& x, const Tensor& slot_of, const Tensor& row_of, int64_t top_k,
               const OptionalTensor& weights) {
  static const auto op =
      find<Tensor(const Tensor&, const Tensor&, const Tensor&, int64_t, const OptionalTensor&)>(
          "moxie::permute");
  return op.call(x, slot_of, row_of, top_k, weights);
}

Tensor unpermute(const Tensor& rows, const Tensor& slot_of, const Tensor& row_of,
                 const c10::SymInt& num_tokens, const OptionalTensor& weights) {
  static const auto op =
      find<Tensor(const Tensor&, const Tensor&, const Tensor&, c10::SymInt, const OptionalTensor&)>(
          "moxie::unpermute");
  return op.call(rows, slot_of, row_of, num_tokens, weights);
}

Tensor unpermute_weights(const Tensor& dout, const Tensor& rows, const Tensor& row_of,
                         const c10::SymInt& top_k) {
  static const auto op = find<Tensor(const Tensor&, const Tensor&, const Tensor&, c10::SymInt)>(
      "moxie::unpermute_weights");
  return op.call(dout, rows, row_of, top_k);
}

Tensor swiglu(const Tensor& h) {
  static const auto op = find<Tensor(const Tensor&)>("moxie::swiglu");
  return op.call(h);
}

Tensor swiglu_backward(const Tensor& da, const Tensor& h) {
  static const auto op = find<Tensor(const Tensor&, const Tensor&)>("moxie::swiglu_backward");
  return op.call(da, h);
}

Two swiglu_quantize_rowwise(const Tensor& h, const QuantizeOptions& options) {
  static const auto op = find<Two(const Tensor&, const OptionalTensor&, Text, Text, Text)>(
      "moxie::swiglu_quantize_rowwise");
  return op.call(h, options.offs, options.rowwise_block, options.rule, options.scale_layout);
}

Four swiglu_quantize_both(const Tensor& h, const QuantizeOptions& options) {
  static const auto op = find<Four(const Tensor&, const OptionalTensor&, Text, Text, Text, Text)>(
      "moxie::swiglu_quantize_both");
  return op.call(h, options.offs, options.rowwise_block, options.colwise_block, options.rule,
                 options.scale_layout);
}

Four swiglu_backward_quantize_both(const Tensor& da, const Tensor& h,
                                   const QuantizeOptions& options) {
  static const auto op =
      find<Four(const Tensor&, const Tensor&, const OptionalTensor&, Text, Text, Text, Text)>(
          "moxie::swiglu_backward_quantize_both");
  return op.call(da, h, options.offs, options.rowwise_block, options.colwise_block, options.rule,
                 options.scale_layout);
}

Two permute_quantize_rowwise(const Tensor& x, const Tensor& slot_of, int64_t top_k,
                             const QuantizeOptions& options) {
  static const auto op =
      find<Two(const Tensor&, const Tensor&, int64_t, const OptionalTensor&, Text, Text, Text)>(
          "moxie::permute_quantize_rowwise");
  return op.call(x, slot_of, top_k, options.offs, options.rowwise_block, options.rule,
                 options.scale_layout);
}

Four permute_quantize_both(const Tensor& x, const Tensor& slot_of, int64_t top_k,
                           const QuantizeOptions& options) {
  static const auto op = find<Four(const Tensor&, const Tensor&, int64_t, const OptionalTensor&,
                                   Text, Text, Text, Text)>("moxie::permute_quantize_both");
  return op.call(x, slot_of, top_k, options.offs, options.rowwise_block, options.colwise_block,
                 options.rule, options.scale_layout);
}

Tensor sum_groups(const Tensor& x, const OptionalTensor& offs) {
  static const auto op = find<Tensor(const Tensor&, const OptionalTensor&)>("moxie::sum_groups");
  return op.call(x, offs);
}

Tensor quantization_stats(const Tensor& x, const StatsOptions& options) {
  static const auto op =
      find<Tensor(const Tensor&, const OptionalTensor&, Text, std::optional<Text>)>(
          "moxie::quantization_stats");
  return op.call(x, options.offs, options.recipe, options.part);
}

void add_once_(const Tensor& total, const Tensor& addend) {
  static const auto op = find<void(const Tensor&, const Tensor&)>("moxie::_add_once_");
  op.call(total, addend);
}

Tensor grouped_mm_quantized(const Tensor& x, const OptionalTensor& x_scale, const Tensor& w,
                            const OptionalTensor& w_scale, const GemmOptions& options) {
  static const auto op =
      find<Tensor(const Tensor&, const OptionalTensor&, const Tensor&, const OptionalTensor&,
                  const OptionalTensor&, Text, const OptionalTensor&, OptionalDtype, OptionalText)>(
          "moxie::grouped_mm", "quantized");
  return op.call(x, x_scale, w, w_scale, options.offs, options.recipe, options.bias, options.dtype,
                 options.scale_layout);
}

Tensor grouped_dgrad(const Tensor& dy, const OptionalTensor& dy_scale, const Tensor& w_t,
                     const OptionalTensor& w_scale_t, const GemmOptions& options) {
  static const auto op =
      find<Tensor(const Tensor&, const OptionalTensor&, const Tensor&, const OptionalTensor&,
                  const OptionalTensor&, Text, OptionalDtype, OptionalText)>(
          "moxie::grouped_dgrad");
  return op.call(dy, dy_scale, w_t, w_scale_t, options.offs, options.recipe, options.dtype,
                 options.scale_layout);
}

Tensor grouped_wgrad(const Tensor& dy_t, const OptionalTensor& dy_scale_t, const Tensor& x_t,
                     const OptionalTensor& x_scale_t, const c10::SymInt& num_rows,
                     const GemmOptions& options) {
  static const auto op =
      find<Tensor(const Tensor&, const OptionalTensor&, const Tensor&, const OptionalTensor&,
                  c10::SymInt, const OptionalTensor&, Text, OptionalDtype, OptionalText)>(
          "moxie::grouped_wgrad");
  return op.call(dy_t, dy_scale_t, x_t, x_scale_t, num_rows, options.offs, options.recipe,
                 options.dtype, options.scale_layout);
}

void grouped_wgrad_add_(const Tensor& dw, const Tensor& dy_t, const OptionalTensor& dy_scale_t,
                        const Tensor& x_t, const OptionalTensor& x_scale_t,
                        const c10::SymInt& num_rows, const GemmOptions& options) {
  static const auto op =
      find<void(const Tensor&, const Tensor&, const OptionalTensor&, const Tensor&,
                const OptionalTensor&, c10::SymInt, const OptionalTensor&, Text, OptionalText)>(
          "moxie::grouped_wgrad_add_");
  op.call(dw, dy_t, dy_scale_t, x_t, x_scale_t, num_rows, options.offs, options.recipe,
          options.scale_layout);
}

Four quantize_weights(const Tensor& w, Text recipe) {
  static const auto op = find<Four(const Tensor&, Text)>("moxie::quantize_weights");
  return op.call(w, recipe);
}

void quantize_weights_out(const Tensor& w, Text recipe, const Tensor& qdata, const Tensor& scale,
                          const Tensor& qdata_t, const Tensor& scale_t) {
  static const auto op =
      find<void(const Tensor&, Text, const Tensor&, const Tensor&, const Tensor&, const Tensor&)>(
          "moxie::quantize_weights", "out");
  op.call(w, recipe, qdata, scale, qdata_t, scale_t);
}

}  // namespace moxie::ops
