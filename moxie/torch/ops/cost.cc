#include "moxie/core/cost/cost.h"

#include <torch/library.h>

#include "moxie/core/layout/parse.h"
#include "moxie/core/scale_layout/scale_layout.h"
#include "moxie/torch/view.h"

namespace moxie::ops {
namespace {

constexpr const char* kOp = "_cost";

Shape shape_from(at::IntArrayRef sizes) {
  switch (sizes.size()) {
    case 2: return {sizes[0], sizes[1]};
    case 3: return {sizes[0], sizes[1], sizes[2]};
    default: fail(kOp, ": shape must have 2 or 3 sizes, got ", sizes.size());
  }
}

std::vector<double> cost(std::string_view op, at::IntArrayRef sizes,
                         std::optional<at::ScalarType> dtype, std::optional<int64_t> num_groups,
                         std::string_view rowwise_block, std::string_view colwise_block,
                         std::string_view scale_layout, std::string_view from_layout,
                         int64_t alignment) {
  return with_op(kOp, [&] {
    const Shape x = shape_from(sizes);
    const auto type = dtype.value_or(at::kBFloat16);
    const auto format = type == at::kFloat ? Format::kF32 : Format::kBf16;
    const Block rowwise = parse_block(rowwise_block, kOp, "rowwise_block");
    const Block colwise = parse_block(colwise_block, kOp, "colwise_block");
    const int64_t row_bytes = x.dim(-1) * static_cast<int64_t>(c10::elementSize(type));
    QuantizeCostArgs quantize{.x = x,
                              .format = format,
                              .num_groups = num_groups,
                              .rowwise = rowwise,
                              .colwise = colwise,
                              .layout = parse_layout(scale_layout, kOp)};
    Cost result;
    if (op == "quantize_both") {
      result = quantize_cost(quantize);
    } else if (op == "quantize_rowwise") {
      quantize.colwise.reset();
      result = quantize_cost(quantize);
    } else if (op == "quantize_colwise") {
      quantize.rowwise.reset();
      result = quantize_cost(quantize);
    } else if (op == "dequantize_rowwise") {
      result = dequantize_cost(x, format, Form::kRowwise, rowwise, num_groups, quantize.layout);
    } else if (op == "dequantize_colwise") {
      result = dequantize_cost(x, format, Form::kColwise, colwise, num_groups, quantize.layout);
    } else if (op == "requantize") {
      result = requantize_cost({.x = x,
                                .num_groups = num_groups,
                                .rowwise = rowwise,
                                .colwise = colwise,
                                .layout = quantize.layout,
                                .from_layout = parse_layout(from_layout, kOp, "from_layout")});
    } else if (op == "quantize_per_row") {
      result = row_scale_cost(x, format, Form::kRowwise, num_groups);
    } else if (op == "quantize_per_col") {
      result = row_scale_cost(x, format, Form::kColwise, num_groups);
    } else if (op == "swizzle_scale" || op == "unswizzle_scale") {
      result = swizzle_cost(x, swizzled_shape<int64_t>(x, num_groups, Form::kRowwise));
    } else if (op == "pad_groups") {
      result = pad_groups_cost(x[0], row_bytes, num_groups.value_or(1), alignment);
    } else if (op == "unpad_groups") {
      result = unpad_groups_cost(x[0], row_bytes);
    } else {
      fail(kOp, ": no cost is known of op '", op, "'");
    }
    return std::vector<double>{result.flops, result.bytes_read, result.bytes_written};
  });
}

bool has_cuda() { return kHasCuda; }

}  // namespace

// Registered for every device at once: without tensor arguments, the dispatcher has no device to
// choose by.
TORCH_LIBRARY_IMPL(moxie, CompositeExplicitAutograd, m) {
  m.impl("_cost", TORCH_FN(cost));
  m.impl("_has_cuda", TORCH_FN(has_cuda));
}

}  // namespace moxie::ops
