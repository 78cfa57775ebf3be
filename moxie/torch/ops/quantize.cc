#include "moxie/core/quantize/quantize.h"

#include "moxie/core/layout/parse.h"
#include "moxie/torch/exec.h"
#include "moxie/torch/ops/register.h"
#include "moxie/torch/view.h"

namespace moxie::ops {
namespace {

struct Request {
  const char* op;
  const Tensor& x;
  const OptionalTensor& offs;
  std::optional<Block> rowwise, colwise;
  ScaleRule rule;
  ScaleLayout layout;
};

// Checks all that can be checked without data, and says what comes back. Every overload and every
// device goes through here, Meta too, so the shapes that are traced are the shapes that run.
Results results_of(const Request& request) {
  const auto& [op, x, offs, rowwise, colwise, rule, layout] = request;
  check_float({op, "x", x});
  check_matrix_or_stack({op, "x", x});
  check_offs(op, offs, x);
  Results results;
  if (rowwise) {
    check_block(op, Form::kRowwise, *rowwise, offs);
    const auto shape =
        operand_shape(sym_shape(x), num_groups(offs), Form::kRowwise, *rowwise, layout);
    results.push_back({"qdata", at::kFloat8_e4m3fn, shape.qdata});
    results.push_back({"scale", at::kFloat8_e8m0fnu, shape.scale});
  }
  if (colwise) {
    check_block(op, Form::kColwise, *colwise, offs);
    const auto shape =
        operand_shape(sym_shape(x), num_groups(offs), Form::kColwise, *colwise, layout);
    results.push_back({"qdata_t", at::kFloat8_e4m3fn, shape.qdata});
    results.push_back({"scale_t", at::kFloat8_e8m0fnu, shape.scale});
  }
  return results;
}

void run(const Request& request, const std::vector<Tensor>& out) {
  if (request.x.is_meta()) return;
  const DeviceScope scope(request.x.device());
  const Tensor x = dense(request.x);
  const OptionalTensor offs = dense(request.offs);
  QuantizeArgs args{.x = const_float_view(x), .offs = offs_view(offs), .rule = request.rule};
  auto next = out.begin();
  const auto operand = [&](Block block) {
    const auto qdata = view<e4m3>(*next++);
    return Operand{block, request.layout, qdata, view<e8m0>(*next++)};
  };
  if (request.rowwise) args.rowwise = operand(*request.rowwise);
  if (request.colwise) args.colwise = operand(*request.colwise);
  quantize(args, scope.exec());
}

std::vector<Tensor> call(const Request& request) {
  const auto out = allocate(results_of(request), request.x);
  run(request, out);
  return out;
}

void call_out(const Request& request, const std::vector<Tensor>& out) {
  check_out(request.op, results_of(request), out, {request.x, request.offs});
  run(request, out);
  mark_written(out);
}

constexpr const char* kRowwiseOp = "quantize_rowwise";
constexpr const char* kColwiseOp = "quantize_colwise";
constexpr const char* kBothOp = "quantize_both";

using Text = std::string_view;

Request parse(const char* op, const Tensor& x, const OptionalTensor& offs,
              std::optional<Text> rowwise, std::optional<Text> colwise, Text rule, Text layout) {
  const bool both = rowwise && colwise;
  Request request{op, x, offs, {}, {}, parse_rule(rule, op), parse_layout(layout, op)};
  if (rowwise) request.rowwise = parse_block(*rowwise, op, both ? "rowwise_block" : "block");
  if (colwise) request.colwise = parse_block(*colwise, op, both ? "colwise_block" : "block");
  return request;
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
