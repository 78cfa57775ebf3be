#include "moxie/torch/ops/dequantize.h"

#include "moxie/core/dequantize/dequantize.h"
#include "moxie/core/layout/parse.h"
#include "moxie/core/row_scale/dequantize_row_scale.h"
#include "moxie/torch/exec.h"
#include "moxie/torch/ops/quantize.h"
#include "moxie/torch/ops/register.h"

namespace moxie::ops {
namespace {

Results results_of(const DequantizeArgs& args) {
  const auto& [op, form, qdata, scale, offs, block, num_rows, dtype, layout, scaling] = args;
  const bool rowwise = form == Form::kRowwise;
  const char* qdata_name = rowwise ? "qdata" : "qdata_t";
  const char* scale_name = rowwise ? "scale" : "scale_t";
  check_e4m3({op, qdata_name, qdata});
  if (scaling == Scaling::kBlock) check_e8m0({op, scale_name, scale});
  check_matrix_or_stack({op, qdata_name, qdata});
  check_device({op, scale_name, scale}, qdata);
  check_offs(op, offs, qdata);

  SymShape x = sym_shape(qdata);
  if (!rowwise) {
    TORCH_CHECK_VALUE(num_rows->sym_ge(0).expect_true(__FILE__, __LINE__), op,
                      ": num_rows must not be negative, got ", *num_rows);
    x = x.dims == 3 ? SymShape(x[0], *num_rows, x[1]) : SymShape(*num_rows, x[0]);
  }
  if (scaling == Scaling::kRow) {
    check_shape({op, scale_name, scale}, row_scale_shape(x, num_groups(offs), form).scale);
    return {{"x", dtype, x}};
  }
  check_block(op, form, block, offs);
  check_shape({op, qdata_name, qdata},
              operand_shape(x, num_groups(offs), form, block, ScaleLayout::kPlain).qdata);
  check_scale_shape({op, scale_name, scale}, {"scale_layout", layout}, {x, offs, form, block});
  return {{"x", dtype, x}};
}

void run(const DequantizeArgs& args, const Tensor& x) {
  if (args.qdata.is_meta()) return;
  const DeviceScope scope(args.qdata.device());
  const Tensor qdata = dense(args.qdata), scale = dense(args.scale);
  const OptionalTensor offs = dense(args.offs);
  if (args.scaling == Scaling::kRow) {
    dequantize_row_scale({.form = args.form,
                          .qdata = const_view<e4m3>(qdata),
                          .scale = const_view<float>(scale),
                          .offs = offs_view(offs),
                          .x = float_view(x)},
                         scope.exec());
    return;
  }
  moxie::dequantize({.form = args.form,
                     .block = args.block,
                     .layout = args.layout,
                     .qdata = const_view<e4m3>(qdata),
                     .scale = const_view<e8m0>(scale),
                     .offs = offs_view(offs),
                     .x = float_view(x)},
                    scope.exec());
}

}  // namespace

Tensor dequantize(const DequantizeArgs& args) {
  const Tensor x = allocate(results_of(args), args.qdata)[0];
  run(args, x);
  return x;
}

namespace {

void dequantize_into(const DequantizeArgs& args, const Tensor& x) {
  check_out(args.op, results_of(args), {x}, {args.qdata, args.scale, args.offs});
  run(args, x);
  mark_written({x});
}

constexpr const char* kRowwiseOp = "dequantize_rowwise";
constexpr const char* kColwiseOp = "dequantize_colwise";

using Text = std::string_view;

DequantizeArgs rowwise(const Tensor& qdata, const Tensor& scale, const OptionalTensor& offs,
                       Text block, std::optional<at::ScalarType> dtype, Text layout) {
  return {kRowwiseOp,
          Form::kRowwise,
          qdata,
          scale,
          offs,
          parse_block(block, kRowwiseOp, "block"),
          {},
          high_precision(dtype, kRowwiseOp),
          parse_layout(layout, kRowwiseOp)};
}

DequantizeArgs colwise(const Tensor& qdata_t, const Tensor& scale_t, const c10::SymInt& num_rows,
                       const OptionalTensor& offs, Text block, std::optional<at::ScalarType> dtype,
                       Text layout) {
  return {kColwiseOp,
          Form::kColwise,
          qdata_t,
          scale_t,
          offs,
          parse_block(block, kColwiseOp, "block"),
          num_rows,
          high_precision(dtype, kColwiseOp),
          parse_layout(layout, kColwiseOp)};
}

Tensor dequantize_rowwise(const Tensor& qdata, const Tensor& scale, const OptionalTensor& offs,
                          Text block, std::optional<at::ScalarType> dtype, Text layout) {
  return with_op(kRowwiseOp,
                 [&] { return dequantize(rowwise(qdata, scale, offs, block, dtype, layout)); });
}

void dequantize_rowwise_out(const Tensor& qdata, const Tensor& scale, const OptionalTensor& offs,
                            Text block, Text layout, const Tensor& x) {
  with_op(kRowwiseOp,
          [&] { dequantize_into(rowwise(qdata, scale, offs, block, x.scalar_type(), layout), x); });
}

Tensor dequantize_colwise(const Tensor& qdata_t, const Tensor& scale_t, c10::SymInt num_rows,
                          const OptionalTensor& offs, Text block,
                          std::optional<at::ScalarType> dtype, Text layout) {
  return with_op(kColwiseOp, [&] {
    return dequantize(colwise(qdata_t, scale_t, num_rows, offs, block, dtype, layout));
  });
}

void dequantize_colwise_out(const Tensor& qdata_t, const Tensor& scale_t, c10::SymInt num_rows,
                            const OptionalTensor& offs, Text block, Text layout, const Tensor& x) {
  with_op(kColwiseOp, [&] {
    dequantize_into(colwise(qdata_t, scale_t, num_rows, offs, block, x.scalar_type(), layout), x);
  });
}

Tensor dequantize_tokens(const Tensor& qdata, const Tensor& scale, int64_t packed) {
  return with_op(kRowwiseOp, [&] {
    const auto spec = unpack<TokenScaleSpec>(packed, kRowwiseOp);
    return dequantize({.op = kRowwiseOp,
                       .form = Form::kRowwise,
                       .qdata = qdata,
                       .scale = scale,
                       .offs = {},
                       .block = spec.block,
                       .num_rows = {},
                       .dtype = at::kBFloat16,
                       .layout = spec.layout});
  });
}

void register_ops(torch::Library& m) {
  m.impl("dequantize_rowwise", TORCH_FN(dequantize_rowwise));
  m.impl("dequantize_rowwise.out", TORCH_FN(dequantize_rowwise_out));
  m.impl("dequantize_colwise", TORCH_FN(dequantize_colwise));
  m.impl("dequantize_colwise.out", TORCH_FN(dequantize_colwise_out));
  m.impl("_dequantize_tokens", TORCH_FN(dequantize_tokens));
}

}  // namespace

MOXIE_REGISTER_OPS(register_ops)

}  // namespace moxie::ops
