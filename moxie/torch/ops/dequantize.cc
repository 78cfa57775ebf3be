#include "moxie/core/dequantize/dequantize.h"

#include "moxie/core/layout/parse.h"
#include "moxie/torch/exec.h"
#include "moxie/torch/ops/register.h"
#include "moxie/torch/view.h"

namespace moxie::ops {
namespace {

struct Request {
  const char* op;
  Form form;
  const Tensor& qdata;  // or qdata_t
  const Tensor& scale;  // or scale_t
  const OptionalTensor& offs;
  Block block;
  std::optional<c10::SymInt> num_rows;  // colwise: the padding hides it
  at::ScalarType dtype;
  ScaleLayout layout;
};

Results results_of(const Request& request) {
  const auto& [op, form, qdata, scale, offs, block, num_rows, dtype, layout] = request;
  const bool rowwise = form == Form::kRowwise;
  const char* qdata_name = rowwise ? "qdata" : "qdata_t";
  const char* scale_name = rowwise ? "scale" : "scale_t";
  check_e4m3({op, qdata_name, qdata});
  check_e8m0({op, scale_name, scale});
  check_matrix_or_stack({op, qdata_name, qdata});
  check_device({op, scale_name, scale}, qdata);
  check_offs(op, offs, qdata);
  check_block(op, form, block, offs);

  SymShape x = sym_shape(qdata);
  if (!rowwise) {
    TORCH_CHECK_VALUE(num_rows->sym_ge(0).expect_true(__FILE__, __LINE__), op,
                      ": num_rows must not be negative, got ", *num_rows);
    x = x.dims == 3 ? SymShape(x[0], *num_rows, x[1]) : SymShape(*num_rows, x[0]);
  }
  check_shape({op, qdata_name, qdata},
              operand_shape(x, num_groups(offs), form, block, ScaleLayout::kPlain).qdata);
  check_scale_shape({op, scale_name, scale}, {"scale_layout", layout}, {x, offs, form, block});
  return {{"x", dtype, x}};
}

void run(const Request& request, const std::vector<Tensor>& out) {
  if (request.qdata.is_meta()) return;
  const DeviceScope scope(request.qdata.device());
  const Tensor qdata = dense(request.qdata), scale = dense(request.scale);
  const OptionalTensor offs = dense(request.offs);
  dequantize({.form = request.form,
              .block = request.block,
              .layout = request.layout,
              .qdata = const_view<e4m3>(qdata),
              .scale = const_view<e8m0>(scale),
              .offs = offs_view(offs),
              .x = float_view(out[0])},
             scope.exec());
}

Tensor call(const Request& request) {
  const auto out = allocate(results_of(request), request.qdata);
  run(request, out);
  return out[0];
}

void call_out(const Request& request, const Tensor& x) {
  const std::vector<Tensor> out = {x};
  check_out(request.op, results_of(request), out, {request.qdata, request.scale, request.offs});
  run(request, out);
  mark_written(out);
}

constexpr const char* kRowwiseOp = "dequantize_rowwise";
constexpr const char* kColwiseOp = "dequantize_colwise";

using Text = std::string_view;

Request rowwise(const Tensor& qdata, const Tensor& scale, const OptionalTensor& offs, Text block,
                std::optional<at::ScalarType> dtype, Text layout) {
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

Request colwise(const Tensor& qdata_t, const Tensor& scale_t, const c10::SymInt& num_rows,
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
                 [&] { return call(rowwise(qdata, scale, offs, block, dtype, layout)); });
}

void dequantize_rowwise_out(const Tensor& qdata, const Tensor& scale, const OptionalTensor& offs,
                            Text block, Text layout, const Tensor& x) {
  with_op(kRowwiseOp,
          [&] { call_out(rowwise(qdata, scale, offs, block, x.scalar_type(), layout), x); });
}

Tensor dequantize_colwise(const Tensor& qdata_t, const Tensor& scale_t, c10::SymInt num_rows,
                          const OptionalTensor& offs, Text block,
                          std::optional<at::ScalarType> dtype, Text layout) {
  return with_op(kColwiseOp, [&] {
    return call(colwise(qdata_t, scale_t, num_rows, offs, block, dtype, layout));
  });
}

void dequantize_colwise_out(const Tensor& qdata_t, const Tensor& scale_t, c10::SymInt num_rows,
                            const OptionalTensor& offs, Text block, Text layout, const Tensor& x) {
  with_op(kColwiseOp, [&] {
    call_out(colwise(qdata_t, scale_t, num_rows, offs, block, x.scalar_type(), layout), x);
  });
}

}  // namespace

void register_dequantize(torch::Library& m) {
  m.impl("dequantize_rowwise", TORCH_FN(dequantize_rowwise));
  m.impl("dequantize_rowwise.out", TORCH_FN(dequantize_rowwise_out));
  m.impl("dequantize_colwise", TORCH_FN(dequantize_colwise));
  m.impl("dequantize_colwise.out", TORCH_FN(dequantize_colwise_out));
}

}  // namespace moxie::ops
