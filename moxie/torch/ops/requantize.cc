#include "moxie/torch/ops/requantize.h"

#include <ATen/ops/empty.h>

#include "moxie/core/requantize/requantize.h"

#include "moxie/core/layout/parse.h"
#include "moxie/torch/exec.h"
#include "moxie/torch/ops/quantize.h"
#include "moxie/torch/ops/register.h"

namespace moxie::ops {
namespace {

constexpr const char* kOp = "requantize";

struct Request {
  const Tensor& qdata;
  const Tensor& scale;
  const OptionalTensor& offs;
  RequantizeSpec spec;
};

using Text = std::string_view;

Request parse(const Tensor& qdata, const Tensor& scale, const OptionalTensor& offs, Text block,
              Text colwise_block, Text rule, Text layout, Text from_layout) {
  return {qdata,
          scale,
          offs,
          {.block = parse_block(block, kOp, "block"),
           .from_layout = parse_layout(from_layout, kOp, "from_layout"),
           .colwise = parse_block(colwise_block, kOp, "colwise_block"),
           .rule = parse_rule(rule, kOp),
           .layout = parse_layout(layout, kOp)}};
}

Results results_of(const Request& request) {
  const auto& [qdata, scale, offs, spec] = request;
  const auto& [block, from_layout, colwise_block, rule, layout] = spec;
  check_e4m3({kOp, "qdata", qdata});
  check_e8m0({kOp, "scale", scale});
  check_matrix_or_stack({kOp, "qdata", qdata});
  check_device({kOp, "scale", scale}, qdata);
  check_offs(kOp, offs, qdata);
  check_block(kOp, Form::kRowwise, block, offs);
  check_block(kOp, Form::kColwise, colwise_block, offs);
  const auto x = sym_shape(qdata);
  check_scale_shape({kOp, "scale", scale}, {"from_layout", from_layout},
                    {x, offs, Form::kRowwise, block});
  check_layout(kOp, Form::kColwise, colwise_block, layout);
  const auto shape = operand_shape(x, num_groups(offs), Form::kColwise, colwise_block, layout);
  return {{"qdata_t", at::kFloat8_e4m3fn, shape.qdata},
          {"scale_t", at::kFloat8_e8m0fnu, shape.scale}};
}

RequantizeArgs args_of(const RequantizeSpec& spec, const View<const e4m3>& qdata,
                       const Tensor& scale, const OptionalTensor& offs,
                       const std::vector<Tensor>& out) {
  return {
      .block = spec.block,
      .from_layout = spec.from_layout,
      .qdata = qdata,
      .scale = const_view<e8m0>(scale),
      .offs = offs_view(offs),
      .colwise = {spec.colwise, spec.layout, view<e4m3>(out[0]), view<e8m0>(out[1])},
      .rule = spec.rule,
  };
}

void run(const Request& request, const std::vector<Tensor>& out) {
  if (request.qdata.is_meta()) return;
  const DeviceScope scope(request.qdata.device());
  const Tensor qdata = dense(request.qdata), scale = dense(request.scale);
  const OptionalTensor offs = dense(request.offs);
  moxie::requantize(args_of(request.spec, const_view<e4m3>(qdata), scale, offs, out), scope.exec());
}

std::vector<Tensor> call(const Request& request) {
  const auto out = allocate(results_of(request), request.qdata);
  run(request, out);
  return out;
}

std::tuple<Tensor, Tensor> requantize(const Tensor& qdata, const Tensor& scale,
                                      const OptionalTensor& offs, Text block, Text colwise_block,
                                      Text rule, Text layout, Text from_layout) {
  return with_op(kOp, [&] {
    return two(call(parse(qdata, scale, offs, block, colwise_block, rule, layout, from_layout)));
  });
}

std::vector<Tensor> requantize_packed(const Tensor& qdata, const Tensor& scale,
                                      const OptionalTensor& offs, int64_t packed) {
  return with_op(kOp, [&] {
    return call({qdata, scale, offs, unpack<RequantizeSpec>(packed, kOp)});
  });
}

void requantize_out(const Tensor& qdata, const Tensor& scale, const OptionalTensor& offs,
                    Text block, Text colwise_block, Text rule, Text layout, Text from_layout,
                    const Tensor& qdata_t, const Tensor& scale_t) {
  with_op(kOp, [&] {
    const auto request = parse(qdata, scale, offs, block, colwise_block, rule, layout, from_layout);
    const std::vector<Tensor> out = {qdata_t, scale_t};
    check_out(kOp, results_of(request), out, {qdata, scale, offs});
    run(request, out);
    mark_written(out);
  });
}

void register_ops(torch::Library& m) {
  m.impl("requantize", TORCH_FN(requantize));
  m.impl("requantize.out", TORCH_FN(requantize_out));
  m.impl("_requantize", TORCH_FN(requantize_packed));
}

}  // namespace

MOXIE_REGISTER_OPS(register_ops)

std::optional<Quantized> requantize_apart(const RowsApart& x, const OptionalTensor& offs,
                                          const RequantizeSpec& spec) {
  const DeviceScope scope(x.scale.device());
  // A matrix of this shape without memory of its own, for what looks at shapes.
  const auto e4m3 = x.scale.options().dtype(at::kFloat8_e4m3fn);
  const Tensor shape = at::empty({1, 1}, e4m3).expand({x.rows, x.columns});
  const auto out = allocate(results_of({shape, x.scale, offs, spec}), x.scale);
  RequantizeArgs args = args_of(spec, {nullptr, {x.rows, x.columns}}, x.scale, offs, out);
  args.apart = x.qdata;
  if (!can_gather(args, scope.exec())) return std::nullopt;
  moxie::requantize(args, scope.exec());
  return Quantized{out[0], out[1]};
}

}  // namespace moxie::ops
