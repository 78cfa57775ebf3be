#include "moxie/core/scale_layout/scale_layout.h"

#include "moxie/core/layout/parse.h"
#include "moxie/torch/exec.h"
#include "moxie/torch/ops/quantize.h"
#include "moxie/torch/ops/register.h"

namespace moxie::ops {
namespace {

Tensor allocate_scale(const char* name, const SymShape& shape, const Tensor& like) {
  return allocate({{name, at::kFloat8_e8m0fnu, shape}}, like)[0];
}

void check_scale(const char* op, const char* name, const Tensor& scale) {
  check_e8m0({op, name, scale});
  check_matrix_or_stack({op, name, scale});
}

void check_size(const char* op, const char* name, const c10::SymInt& size) {
  TORCH_CHECK_VALUE(size.sym_ge(0).expect_true(__FILE__, __LINE__), op, ": ", name,
                    " must not be negative, got ", size);
}

Block parse_scale_block(std::string_view text, const char* op, Form form) {
  const Block block = parse_block(text, op, "block");
  check_block(op, form, block, std::nullopt);
  return block;
}

Tensor swizzle(const char* op, const Tensor& scale, const OptionalTensor& offs, Form form) {
  check_scale(op, "scale", scale);
  check_offs(op, offs, scale);
  const Tensor out =
      allocate_scale("swizzled", swizzled_shape(sym_shape(scale), num_groups(offs), form), scale);
  if (scale.is_meta()) return out;
  const DeviceScope scope(scale.device());
  const Tensor plain = dense(scale);
  const OptionalTensor dense_offs = dense(offs);
  moxie::swizzle_scale({.form = form,
                        .plain = const_view<e8m0>(plain),
                        .offs = offs_view(dense_offs),
                        .swizzled = view<e8m0>(out)},
                       scope.exec());
  return out;
}

Tensor swizzle_scale(const Tensor& scale, const OptionalTensor& offs, std::string_view form) {
  constexpr const char* kOp = "swizzle_scale";
  return with_op(kOp, [&] { return swizzle(kOp, scale, offs, parse_form(form, kOp)); });
}

// The shape of the plain scales for swizzled ones. One swizzled matrix and a stack of flattened
// swizzled matrices both have two dims, but differ in width: a swizzled matrix has at least 128
// rows, so flattened it is wider, unless it is empty.
SymShape plain_shape(const char* op, const Tensor& swizzled, const c10::SymInt& rows,
                     const c10::SymInt& cols, const OptionalTensor& offs) {
  const SymShape plain(rows, cols);
  if (offs) return plain;
  const auto matrix = swizzled_shape<c10::SymInt>(plain, std::nullopt, Form::kRowwise);
  const c10::SymInt flat = matrix[0] * matrix[1], width = swizzled.sym_size(1);
  if (width == matrix[1] && (width != flat || swizzled.sym_size(0) == matrix[0])) return plain;
  TORCH_CHECK_VALUE(width == flat, op, ": swizzled must be [", matrix[0], ", ", matrix[1],
                    "], or [groups, ", flat, "] for a stack, got ", swizzled.sym_sizes());
  return {swizzled.sym_size(0), rows, cols};
}

Tensor unswizzle_scale(const Tensor& swizzled, c10::SymInt rows, c10::SymInt cols,
                       const OptionalTensor& offs, std::string_view form_text) {
  constexpr const char* kOp = "unswizzle_scale";
  return with_op(kOp, [&] {
    const Form form = parse_form(form_text, kOp);
    check_e8m0({kOp, "swizzled", swizzled});
    TORCH_CHECK_VALUE(swizzled.dim() == 2, kOp,
                      ": swizzled must be a matrix or [groups, flattened matrix] (2 dims), got ",
                      swizzled.dim(), " dims");
    check_offs(kOp, offs, swizzled);
    check_size(kOp, "rows", rows);
    check_size(kOp, "cols", cols);
    const auto shape = plain_shape(kOp, swizzled, rows, cols, offs);
    check_shape({kOp, "swizzled", swizzled}, swizzled_shape(shape, num_groups(offs), form));
    const Tensor out = allocate_scale("scale", shape, swizzled);
    if (swizzled.is_meta()) return out;
    const DeviceScope scope(swizzled.device());
    const Tensor in = dense(swizzled);
    const OptionalTensor dense_offs = dense(offs);
    moxie::unswizzle_scale({.form = form,
                            .swizzled = const_view<e8m0>(in),
                            .offs = offs_view(dense_offs),
                            .plain = view<e8m0>(out)},
                           scope.exec());
    return out;
  });
}

Tensor replicate(const char* op, const Tensor& scale, const c10::SymInt& outer,
                 const c10::SymInt& k, Block block, Form form) {
  check_scale(op, "scale", scale);
  check_size(op, "outer", outer);
  check_size(op, "k", k);
  const c10::SymInt cols = ceil_div(k, c10::SymInt(kMxBlock));
  const auto shape =
      scale.dim() == 3 ? SymShape(scale.sym_size(0), outer, cols) : SymShape(outer, cols);
  check_shape({op, "scale", scale}, compact_shape(shape, form, block));
  const Tensor out = allocate_scale("replicated", shape, scale);
  if (scale.is_meta()) return out;
  const DeviceScope scope(scale.device());
  const Tensor compact = dense(scale);
  moxie::replicate_scale({.form = form,
                          .block = block,
                          .compact = const_view<e8m0>(compact),
                          .replicated = view<e8m0>(out)},
                         scope.exec());
  return out;
}

Tensor replicate_scale(const Tensor& scale, c10::SymInt outer, c10::SymInt k, std::string_view text,
                       std::string_view form_text) {
  constexpr const char* kOp = "replicate_scale";
  return with_op(kOp, [&] {
    const Form form = parse_form(form_text, kOp);
    return replicate(kOp, scale, outer, k, parse_scale_block(text, kOp, form), form);
  });
}

Tensor token_scale(const Tensor& scale, const OptionalTensor& offs, c10::SymInt rows,
                   c10::SymInt cols, int64_t packed) {
  constexpr const char* kOp = "token_scale";
  return with_op(kOp, [&] {
    const auto spec = unpack<TokenScaleSpec>(packed, kOp);
    const Tensor per_32 = spec.block == Block{1, kMxBlock}
                              ? scale
                              : replicate(kOp, scale, rows, cols, spec.block, Form::kRowwise);
    return spec.layout == ScaleLayout::kSwizzled ? swizzle(kOp, per_32, offs, Form::kRowwise)
                                                 : per_32;
  });
}

Tensor compact_scale(const Tensor& scale, std::string_view block_text, std::string_view form_text) {
  constexpr const char* kOp = "compact_scale";
  return with_op(kOp, [&] {
    const Form form = parse_form(form_text, kOp);
    const Block block = parse_scale_block(block_text, kOp, form);
    check_scale(kOp, "scale", scale);
    const Tensor out =
        allocate_scale("compact", compact_shape(sym_shape(scale), form, block), scale);
    if (scale.is_meta()) return out;
    const DeviceScope scope(scale.device());
    const Tensor replicated = dense(scale);
    moxie::compact_scale({.form = form,
                          .block = block,
                          .replicated = const_view<e8m0>(replicated),
                          .compact = view<e8m0>(out)},
                         scope.exec());
    return out;
  });
}

void register_ops(torch::Library& m) {
  m.impl("swizzle_scale", TORCH_FN(swizzle_scale));
  m.impl("unswizzle_scale", TORCH_FN(unswizzle_scale));
  m.impl("replicate_scale", TORCH_FN(replicate_scale));
  m.impl("compact_scale", TORCH_FN(compact_scale));
  m.impl("_token_scale", TORCH_FN(token_scale));
}

}  // namespace

MOXIE_REGISTER_OPS(register_ops)

}  // namespace moxie::ops
