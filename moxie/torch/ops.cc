#include "moxie/torch/ops.h"

#include <ATen/core/dispatch/Dispatcher.h>

namespace moxie::ops {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<at::Tensor>;
using Text = std::string_view;
using Two = std::tuple<Tensor, Tensor>;
using Three = std::tuple<Tensor, Tensor, Tensor>;
using Four = std::tuple<Tensor, Tensor, Tensor, Tensor>;

template <class Signature>
auto find(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
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

Two requantize(const Tensor& qdata, const Tensor& scale, const QuantizeOptions& options) {
  static const auto op =
      find<Two(const Tensor&, const Tensor&, const OptionalTensor&, Text, Text, Text, Text)>(
          "moxie::requantize");
  return op.call(qdata, scale, options.offs, options.rowwise_block, options.colwise_block,
                 options.rule, options.scale_layout);
}

Tensor dequantize_rowwise(const Tensor& qdata, const Tensor& scale,
                          const DequantizeOptions& options) {
  static const auto op = find<Tensor(const Tensor&, const Tensor&, const OptionalTensor&, Text,
                                     std::optional<at::ScalarType>)>("moxie::dequantize_rowwise");
  return op.call(qdata, scale, options.offs, options.block.value_or("1x32"), options.dtype);
}

Tensor dequantize_colwise(const Tensor& qdata_t, const Tensor& scale_t, const c10::SymInt& num_rows,
                          const DequantizeOptions& options) {
  static const auto op =
      find<Tensor(const Tensor&, const Tensor&, c10::SymInt, const OptionalTensor&, Text,
                  std::optional<at::ScalarType>)>("moxie::dequantize_colwise");
  return op.call(qdata_t, scale_t, num_rows, options.offs, options.block.value_or("32x1"),
                 options.dtype);
}

Two quantize_per_row(const Tensor& x, const OptionalTensor& offs) {
  static const auto op = find<Two(const Tensor&, const OptionalTensor&)>("moxie::quantize_per_row");
  return op.call(x, offs);
}

Two quantize_per_col(const Tensor& x, const OptionalTensor& offs) {
  static const auto op = find<Two(const Tensor&, const OptionalTensor&)>("moxie::quantize_per_col");
  return op.call(x, offs);
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

}  // namespace moxie::ops
