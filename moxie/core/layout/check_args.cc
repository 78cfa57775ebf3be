#include "moxie/core/layout/check_args.h"

#include <limits>

#include "moxie/core/base/check.h"

namespace moxie {

std::optional<int64_t> num_groups(const OptionalOffs& offs) {
  return offs ? std::optional(offs->dim(0)) : std::nullopt;
}

std::optional<int64_t> num_groups(const Panels& panels) {
  return panels.offs ? std::optional(panels.count) : std::nullopt;
}

void check_offs(std::string_view op, const View<const int32_t>& offs, int64_t limit,
                std::string_view what, Backend backend) {
  MOXIE_CHECK(offs.shape.dims == 1, op, ": offs must be [groups], got ", offs.shape);
  const int64_t groups = offs.dim(0);
  MOXIE_CHECK(groups >= 1 && groups <= kMaxGroups, op, ": offs must hold 1 to ", kMaxGroups,
              " groups, got ", groups);
  if (backend == Backend::kCuda) return;
  int64_t before = 0;
  for (int64_t g = 0; g < groups; ++g) {
    const int64_t end = offs.data[g];
    MOXIE_CHECK(end >= before, op, ": offs must not decrease and start at 0 or above, got ", end,
                " after ", before, " at group ", g);
    MOXIE_CHECK(end <= limit, op, ": offs must not pass the end of the ", limit, " ", what,
                ", got ", end, " at group ", g);
    before = end;
  }
}

Panels make_panels(std::string_view op, const Shape& x, const OptionalOffs& offs, Backend backend) {
  MOXIE_CHECK(x.dims == 2 || x.dims == 3, op,
              ": x must be tokens [rows, cols] or weights [groups, rows, cols], got ", x);
  for (int i = 0; i < x.dims; ++i)
    MOXIE_CHECK(x[i] >= 0, op, ": sizes must not be negative, got ", x);
  if (x.dims == 3) {
    MOXIE_CHECK(!offs, op, ": offs must be absent for weights ", x, ", whose groups all have ",
                x[1], " rows");
    return {.rows = x[1], .cols = x[2], .count = x[0], .offs = nullptr, .weights = true};
  }
  MOXIE_CHECK(x[0] <= std::numeric_limits<int32_t>::max(), op,
              ": rows must fit the int32 of offs, got ", x[0]);
  if (!offs) return {.rows = x[0], .cols = x[1], .count = 1, .offs = nullptr, .weights = false};
  check_offs(op, *offs, x[0], "rows", backend);
  return {.rows = x[0], .cols = x[1], .count = offs->dim(0), .offs = offs->data, .weights = false};
}

void check_operand_block(std::string_view op, Form form, Block block, const Panels& panels) {
  bool known = false;
  for (const Block candidate : kBlocks) known = known || candidate == block;
  MOXIE_CHECK(known, op, ": block must be one of the supported blocks, got ", name(block));
  MOXIE_CHECK(is_operand_block(block, form), op, ": the ", name(form), " form contracts ",
              form == Form::kRowwise ? "columns" : "rows",
              ", so its block must span at least 32 of them, got ", name(block));
  MOXIE_CHECK(form == Form::kColwise || block.rows == 1 || !panels.offs, op,
              ": with offs a rowwise block must be one row tall (1x32 or 1x128), got ",
              name(block));
}

void check_layout(std::string_view op, Form form, Block block, ScaleLayout layout) {
  MOXIE_CHECK(layout != ScaleLayout::kQuads || k_of(block, form) == kQuadBlock, op,
              ": scales in quads need blocks of ", kQuadBlock, " ",
              form == Form::kRowwise ? "columns" : "rows", " in the ", name(form), " form, got ",
              name(block));
}

void check_shape(std::string_view op, std::string_view argument, const Shape& shape,
                 const Shape& expected) {
  MOXIE_CHECK(shape == expected, op, ": ", argument, " must be ", expected, ", got ", shape);
}

void check_quantized_out(std::string_view op, Form form, const QuantizedOut& out, const Shape& x,
                         const Panels& panels) {
  check_operand_block(op, form, out.block, panels);
  check_layout(op, form, out.block, out.layout);
  const auto expected = operand_shape<int64_t>(x, num_groups(panels), form, out.block, out.layout);
  const bool rowwise = form == Form::kRowwise;
  check_shape(op, rowwise ? "qdata" : "qdata_t", out.qdata.shape, expected.qdata);
  check_shape(op, rowwise ? "scale" : "scale_t", out.scale.shape, expected.scale);
}

}  // namespace moxie
