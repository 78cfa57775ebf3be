#include "moxie/core/quantize/quantize.h"

#include "moxie/torch/exec.h"
#include "moxie/torch/ops/forms.h"
#include "moxie/torch/ops/register.h"
#include "moxie/torch/view.h"

namespace moxie::ops {
namespace {

struct Request {
  const Tensor& x;
  FormsRequest forms;
};

Results results_of(const Request& request) {
  const auto& [x, forms] = request;
  check_float({forms.op, "x", x});
  check_matrix_or_stack({forms.op, "x", x});
  check_offs(forms.op, forms.offs, x);
  return forms_results(forms);
}

void run(const Request& request, const std::vector<Tensor>& out) {
  if (request.x.is_meta()) return;
  const DeviceScope scope(request.x.device());
  const Tensor x = dense(request.x);
  const OptionalTensor offs = dense(request.forms.offs);
  quantize(args_of(const_float_view(x), forms_in(request.forms, offs, out)), scope.exec());
}

std::vector<Tensor> call(const Request& request) {
  const auto out = allocate(results_of(request), request.x);
  run(request, out);
  return out;
}

void call_out(const Request& request, const std::vector<Tensor>& out) {
  check_out(request.forms.op, results_of(request), out, {request.x, request.forms.offs});
  run(request, out);
  mark_written(out);
}

constexpr const char* kRowwiseOp = "quantize_rowwise";
constexpr const char* kColwiseOp = "quantize_colwise";
constexpr const char* kBothOp = "quantize_both";

using Text = std::string_view;

Request parse(const char* op, const Tensor& x, const OptionalTensor& offs,
              std::optional<Text> rowwise, std::optional<Text> colwise, Text rule, Text layout) {
  check_matrix_or_stack({op, "x", x});  // before its shape is looked at
  return {x, parse_forms(op, sym_shape(x), offs, {rowwise, colwise, rule, layout})};
}

std::tuple<Tensor, Tensor> quantize_rowwise(const Tensor& x, const OptionalTensor& offs, Text block,
                                            Text rule, Text layout) {
  return with_op(kRowwiseOp, [&] {
    const auto out = call(parse(kRowwiseOp, x, offs, block, {}, rule, layout));
    return std::tuple(out[0], out[1]);
  });
}

void quantize_rowwise_out(const Tensor& x, const OptionalTensor& offs, Text block, Text rule,
                          Text layout, const Tensor& qdata, const Tensor& scale) {
  with_op(kRowwiseOp, [&] {
    call_out(parse(kRowwiseOp, x, offs, block, {}, rule, layout), {qdata, scale});
  });
}

std::tuple<Tensor, Tensor> quantize_colwise(const Tensor& x, const OptionalTensor& offs, Text block,
                                            Text rule, Text layout) {
  return with_op(kColwiseOp, [&] {
    const auto out = call(parse(kColwiseOp, x, offs, {}, block, rule, layout));
    return std::tuple(out[0], out[1]);
  });
}

void quantize_colwise_out(const Tensor& x, const OptionalTensor& offs, Text block, Text rule,
                          Text layout, const Tensor& qdata_t, const Tensor& scale_t) {
  with_op(kColwiseOp, [&] {
    call_out(parse(kColwiseOp, x, offs, {}, block, rule, layout), {qdata_t, scale_t});
  });
}

std::tuple<Tensor, Tensor, Tensor, Tensor> quantize_both(const Tensor& x,
                                                         const OptionalTensor& offs,
                                                         Text rowwise_block, Text colwise_block,
                                                         Text rule, Text layout) {
  return with_op(kBothOp, [&] {
    const auto out = call(parse(kBothOp, x, offs, rowwise_block, colwise_block, rule, layout));
    return std::tuple(out[0], out[1], out[2], out[3]);
  });
}

void quantize_both_out(const Tensor& x, const OptionalTensor& offs, Text rowwise_block,
                       Text colwise_block, Text rule, Text layout, const Tensor& qdata,
                       const Tensor& scale, const Tensor& qdata_t, const Tensor& scale_t) {
  with_op(kBothOp, [&] {
    call_out(parse(kBothOp, x, offs, rowwise_block, colwise_block, rule, layout),
             {qdata, scale, qdata_t, scale_t});
  });
}

}  // namespace

void register_quantize(torch::Library& m) {
  m.impl("quantize_rowwise", TORCH_FN(quantize_rowwise));
  m.impl("quantize_rowwise.out", TORCH_FN(quantize_rowwise_out));
  m.impl("quantize_colwise", TORCH_FN(quantize_colwise));
  m.impl("quantize_colwise.out", TORCH_FN(quantize_colwise_out));
  m.impl("quantize_both", TORCH_FN(quantize_both));
  m.impl("quantize_both.out", TORCH_FN(quantize_both_out));
}

}  // namespace moxie::ops
