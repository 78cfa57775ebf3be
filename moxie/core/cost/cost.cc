#include "moxie/core/cost/cost.h"

namespace moxie {
namespace {

double count(const Shape& shape) { return static_cast<double>(numel(shape)); }

// Counts are bytes, because e4m3 elements and e8m0 scales take one byte each.
double operand_bytes(const Shape& x, std::optional<int64_t> num_groups, Form form, Block block,
                     ScaleLayout layout) {
  const auto shape = operand_shape<int64_t>(x, num_groups, form, block, layout);
  return count(shape.qdata) + count(shape.scale);
}

}  // namespace

Cost quantize_cost(const QuantizeCostArgs& args) {
  Cost cost{.bytes_read = count(args.x) * static_cast<double>(bytes_of(args.format))};
  if (args.rowwise)
    cost.bytes_written +=
        operand_bytes(args.x, args.num_groups, Form::kRowwise, *args.rowwise, args.layout);
  if (args.colwise)
    cost.bytes_written +=
        operand_bytes(args.x, args.num_groups, Form::kColwise, *args.colwise, args.layout);
  return cost;
}

Cost dequantize_cost(const Shape& x, Format format, Form form, Block block,
                     std::optional<int64_t> num_groups, ScaleLayout layout) {
  return {.bytes_read = operand_bytes(x, num_groups, form, block, layout),
          .bytes_written = count(x) * static_cast<double>(bytes_of(format))};
}

Cost requantize_cost(const RequantizeCostArgs& args) {
  const auto& [x, num_groups, rowwise, colwise, layout, from_layout] = args;
  return {.bytes_read = operand_bytes(x, num_groups, Form::kRowwise, rowwise, from_layout),
          .bytes_written = operand_bytes(x, num_groups, Form::kColwise, colwise, layout)};
}

Cost row_scale_cost(const Shape& x, Format format, Form form, std::optional<int64_t> num_groups) {
  const auto shape = row_scale_shape<int64_t>(x, num_groups, form);
  return {.bytes_read = count(x) * static_cast<double>(bytes_of(format)),
          .bytes_written = count(shape.qdata) + 4 * count(shape.scale)};
}

Cost pad_groups_cost(int64_t rows, int64_t row_bytes, int64_t num_groups, int64_t alignment) {
  const auto bytes = static_cast<double>(row_bytes);
  return {
      .bytes_read = static_cast<double>(rows) * bytes,
      .bytes_written = static_cast<double>(pad_groups_rows(rows, num_groups, alignment)) * bytes};
}

Cost unpad_groups_cost(int64_t rows, int64_t row_bytes) {
  const double bytes = static_cast<double>(rows) * static_cast<double>(row_bytes);
  return {.bytes_read = bytes, .bytes_written = bytes};
}

Cost swizzle_cost(const Shape& plain, const Shape& swizzled) {
  return {.bytes_read = count(plain), .bytes_written = count(swizzled)};
}

double grouped_mm_flops(int64_t rows, int64_t n, int64_t k) {
  return 2. * static_cast<double>(rows) * static_cast<double>(n) * static_cast<double>(k);
}

}  // namespace moxie
