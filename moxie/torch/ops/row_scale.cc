#include "moxie/core/row_scale/row_scale.h"

#include "moxie/torch/exec.h"
#include "moxie/torch/ops/register.h"
#include "moxie/torch/view.h"

namespace moxie::ops {
namespace {

struct Request {
  const char* op;
  Form form;
  const Tensor& x;
  const OptionalTensor& offs;
};

Results results_of(const Request& request) {
  const auto& [op, form, x, offs] = request;
  const bool rowwise = form == Form::kRowwise;
  check_float({op, "x", x});
  check_matrix_or_stack({op, "x", x});
  check_offs(op, offs, x);
  const auto shape = row_scale_shape(sym_shape(x), num_groups(offs), form);
  return {{rowwise ? "qdata" : "qdata_t", at::kFloat8_e4m3fn, shape.qdata},
          {rowwise ? "scale" : "scale_t", at::kFloat, shape.scale}};
}

void run(const Request& request, const std::vector<Tensor>& out) {
  if (request.x.is_meta()) return;
  const DeviceScope scope(request.x.device());
  const Tensor x = dense(request.x);
  const OptionalTensor offs = dense(request.offs);
  RowScaleArgs args{.x = const_float_view(x), .offs = offs_view(offs)};
  (request.form == Form::kRowwise ? args.rowwise : args.colwise) =
      RowScaleOperand{view<e4m3>(out[0]), view<float>(out[1])};
  quantize_row_scale(args, scope.exec());
}

std::tuple<Tensor, Tensor> call(const Request& request) {
  return with_op(request.op, [&] {
    const auto out = allocate(results_of(request), request.x);
    run(request, out);
    return std::tuple(out[0], out[1]);
  });
}

void call_out(const Request& request, const std::vector<Tensor>& out) {
  with_op(request.op, [&] {
    check_out(request.op, results_of(request), out, {request.x, request.offs});
    run(request, out);
    mark_written(out);
  });
}

std::tuple<Tensor, Tensor> quantize_per_row(const Tensor& x, const OptionalTensor& offs) {
  return call({"quantize_per_row", Form::kRowwise, x, offs});
}

void quantize_per_row_out(const Tensor& x, const OptionalTensor& offs, const Tensor& qdata,
                          const Tensor& scale) {
  call_out({"quantize_per_row", Form::kRowwise, x, offs}, {qdata, scale});
}

std::tuple<Tensor, Tensor> quantize_per_col(const Tensor& x, const OptionalTensor& offs) {
  return call({"quantize_per_col", Form::kColwise, x, offs});
}

void quantize_per_col_out(const Tensor& x, const OptionalTensor& offs, const Tensor& qdata_t,
                          const Tensor& scale_t) {
  call_out({"quantize_per_col", Form::kColwise, x, offs}, {qdata_t, scale_t});
}

}  // namespace

void register_row_scale(torch::Library& m) {
  m.impl("quantize_per_row", TORCH_FN(quantize_per_row));
  m.impl("quantize_per_row.out", TORCH_FN(quantize_per_row_out));
  m.impl("quantize_per_col", TORCH_FN(quantize_per_col));
  m.impl("quantize_per_col.out", TORCH_FN(quantize_per_col_out));
}

}  // namespace moxie::ops
