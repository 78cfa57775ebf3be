#include "moxie/torch/ops/quantize.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/where.h>

#include "moxie/core/layout/parse.h"
#include "moxie/core/row_scale/row_scale.h"
#include "moxie/torch/exec.h"
#include "moxie/torch/ops/register.h"

namespace moxie::ops {
namespace {

Results results_of(const char* op, const Tensor& x, const OptionalTensor& offs,
                   const QuantizeSpec& spec) {
  check_float({op, "x", x});
  check_matrix_or_stack({op, "x", x});
  check_offs(op, offs, x);
  return forms_results({op, sym_shape(x), offs, spec});
}

// As if every scale had been chosen one power of two too small: the top of each block clips.
void make_scales_too_small(const std::vector<Tensor>& out) {
  for (size_t i = 0; i < out.size(); i += 2) {
    const Tensor& data = out[i];
    data.view(at::kByte).copy_(
        (data.to(at::kFloat) * 2).clamp(-448, 448).to(at::kFloat8_e4m3fn).view(at::kByte));
    const Tensor code = out[i + 1].view(at::kByte);
    code.copy_(at::where((code > 0) & (code < kE8m0Nan), code - 1, code));
  }
}

void run(const Tensor& tensor, const OptionalTensor& ends, const QuantizeSpec& spec,
         const std::vector<Tensor>& out) {
  if (tensor.is_meta()) return;
  const DeviceScope scope(tensor.device());
  const Tensor x = dense(tensor);
  const OptionalTensor offs = dense(ends);
  if (spec.scaling == Scaling::kBlock) {
    moxie::quantize(args_of(const_float_view(x), forms_in(spec, offs, out)), scope.exec());
    if (spec.scales_too_small) make_scales_too_small(out);
    return;
  }
  RowScaleArgs args{.x = const_float_view(x), .offs = offs_view(offs)};
  auto next = out.begin();
  const auto operand = [&] {
    const auto qdata = view<e4m3>(*next++);
    return RowScaleOperand{qdata, view<float>(*next++)};
  };
  if (spec.rowwise) args.rowwise = operand();
  if (spec.colwise) args.colwise = operand();
  quantize_row_scale(args, scope.exec());
}

}  // namespace

Results forms_results(const FormsArgs& args) {
  const auto& [op, x, offs, spec] = args;
  const bool by_row = spec.scaling == Scaling::kRow;
  const auto dtype = by_row ? at::kFloat : at::kFloat8_e8m0fnu;
  Results results;
  const auto add = [&](Form form, Block block, const char* qdata, const char* scale) {
    if (!by_row) {
      check_block(op, form, block, offs);
      check_layout(op, form, block, spec.layout);
    }
    const auto shape = by_row ? row_scale_shape(x, num_groups(offs), form)
                              : operand_shape(x, num_groups(offs), form, block, spec.layout);
    results.push_back({qdata, at::kFloat8_e4m3fn, shape.qdata});
    results.push_back({scale, dtype, shape.scale});
  };
  if (spec.rowwise) add(Form::kRowwise, *spec.rowwise, "qdata", "scale");
  if (spec.colwise) add(Form::kColwise, *spec.colwise, "qdata_t", "scale_t");
  return results;
}

QuantizeForms forms_in(const QuantizeSpec& spec, const OptionalTensor& offs,
                       const std::vector<Tensor>& out) {
  QuantizeForms forms{.offs = offs_view(offs), .rule = spec.rule};
  auto next = out.begin();
  const auto operand = [&](Block block) {
    const auto qdata = view<e4m3>(*next++);
    return Operand{block, spec.layout, qdata, view<e8m0>(*next++)};
  };
  if (spec.rowwise) forms.rowwise = operand(*spec.rowwise);
  if (spec.colwise) forms.colwise = operand(*spec.colwise);
  return forms;
}

std::vector<Tensor> quantize(const char* op, const Tensor& x, const OptionalTensor& offs,
                             const QuantizeSpec& spec) {
  const auto out = allocate(results_of(op, x, offs, spec), x);
  run(x, offs, spec, out);
  return out;
}

void quantize_into(const char* op, const Tensor& x, const OptionalTensor& offs,
                   const QuantizeSpec& spec, const std::vector<Tensor>& out) {
  check_out(op, results_of(op, x, offs, spec), out, {x, offs});
  run(x, offs, spec, out);
  mark_written(out);
}

QuantizeSpec parse_forms(const char* op, const FormsText& text) {
  const bool both = text.rowwise && text.colwise;
  QuantizeSpec spec{.rule = parse_rule(text.rule, op), .layout = parse_layout(text.layout, op)};
  if (text.rowwise) spec.rowwise = parse_block(*text.rowwise, op, both ? "rowwise_block" : "block");
  if (text.colwise) spec.colwise = parse_block(*text.colwise, op, both ? "colwise_block" : "block");
  return spec;
}

namespace {

constexpr const char *kRowwiseOp = "quantize_rowwise", *kColwiseOp = "quantize_colwise",
                     *kBothOp = "quantize_both", *kPerRowOp = "quantize_per_row",
                     *kPerColOp = "quantize_per_col";
constexpr QuantizeSpec kPerRow{.scaling = Scaling::kRow, .rowwise = Block{}},
    kPerCol{.scaling = Scaling::kRow, .colwise = Block{}};

using Text = std::string_view;
using Two = std::tuple<Tensor, Tensor>;
using Four = std::tuple<Tensor, Tensor, Tensor, Tensor>;

Two quantize_rowwise(const Tensor& x, const OptionalTensor& offs, Text block, Text rule,
                     Text layout) {
  return with_op(kRowwiseOp, [&] {
    return two(quantize(kRowwiseOp, x, offs, parse_forms(kRowwiseOp, {block, {}, rule, layout})));
  });
}

void quantize_rowwise_out(const Tensor& x, const OptionalTensor& offs, Text block, Text rule,
                          Text layout, const Tensor& qdata, const Tensor& scale) {
  with_op(kRowwiseOp, [&] {
    quantize_into(kRowwiseOp, x, offs, parse_forms(kRowwiseOp, {block, {}, rule, layout}),
                  {qdata, scale});
  });
}

Two quantize_colwise(const Tensor& x, const OptionalTensor& offs, Text block, Text rule,
                     Text layout) {
  return with_op(kColwiseOp, [&] {
    return two(quantize(kColwiseOp, x, offs, parse_forms(kColwiseOp, {{}, block, rule, layout})));
  });
}

void quantize_colwise_out(const Tensor& x, const OptionalTensor& offs, Text block, Text rule,
                          Text layout, const Tensor& qdata_t, const Tensor& scale_t) {
  with_op(kColwiseOp, [&] {
    quantize_into(kColwiseOp, x, offs, parse_forms(kColwiseOp, {{}, block, rule, layout}),
                  {qdata_t, scale_t});
  });
}

Four quantize_both(const Tensor& x, const OptionalTensor& offs, Text rowwise, Text colwise,
                   Text rule, Text layout) {
  return with_op(kBothOp, [&] {
    return four(quantize(kBothOp, x, offs, parse_forms(kBothOp, {rowwise, colwise, rule, layout})));
  });
}

void quantize_both_out(const Tensor& x, const OptionalTensor& offs, Text rowwise, Text colwise,
                       Text rule, Text layout, const Tensor& qdata, const Tensor& scale,
                       const Tensor& qdata_t, const Tensor& scale_t) {
  with_op(kBothOp, [&] {
    quantize_into(kBothOp, x, offs, parse_forms(kBothOp, {rowwise, colwise, rule, layout}),
                  {qdata, scale, qdata_t, scale_t});
  });
}

Two quantize_per_row(const Tensor& x, const OptionalTensor& offs) {
  return with_op(kPerRowOp, [&] { return two(quantize(kPerRowOp, x, offs, kPerRow)); });
}

void quantize_per_row_out(const Tensor& x, const OptionalTensor& offs, const Tensor& qdata,
                          const Tensor& scale) {
  with_op(kPerRowOp, [&] { quantize_into(kPerRowOp, x, offs, kPerRow, {qdata, scale}); });
}

Two quantize_per_col(const Tensor& x, const OptionalTensor& offs) {
  return with_op(kPerColOp, [&] { return two(quantize(kPerColOp, x, offs, kPerCol)); });
}

void quantize_per_col_out(const Tensor& x, const OptionalTensor& offs, const Tensor& qdata_t,
                          const Tensor& scale_t) {
  with_op(kPerColOp, [&] { quantize_into(kPerColOp, x, offs, kPerCol, {qdata_t, scale_t}); });
}

std::vector<Tensor> quantize_packed(const Tensor& x, const OptionalTensor& offs, int64_t spec) {
  return with_op("quantize",
                 [&] { return quantize("quantize", x, offs, unpack<QuantizeSpec>(spec)); });
}

void register_ops(torch::Library& m) {
  m.impl("quantize_rowwise", TORCH_FN(quantize_rowwise));
  m.impl("quantize_rowwise.out", TORCH_FN(quantize_rowwise_out));
  m.impl("quantize_colwise", TORCH_FN(quantize_colwise));
  m.impl("quantize_colwise.out", TORCH_FN(quantize_colwise_out));
  m.impl("quantize_both", TORCH_FN(quantize_both));
  m.impl("quantize_both.out", TORCH_FN(quantize_both_out));
  m.impl("quantize_per_row", TORCH_FN(quantize_per_row));
  m.impl("quantize_per_row.out", TORCH_FN(quantize_per_row_out));
  m.impl("quantize_per_col", TORCH_FN(quantize_per_col));
  m.impl("quantize_per_col.out", TORCH_FN(quantize_per_col_out));
  m.impl("_quantize", TORCH_FN(quantize_packed));
}

}  // namespace

MOXIE_REGISTER_OPS(register_ops)

}  // namespace moxie::ops
