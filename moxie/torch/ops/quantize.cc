#include "moxie/torch/ops/quantize.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/where.h>

#include <algorithm>

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

// Makes every scale one power of two too small, so that the top of each block saturates.
void make_scales_too_small(const std::vector<Tensor>& out) {
  for (size_t i = 0; i < out.size(); i += 2) {
    const Tensor& data = out[i];
    data.view(at::kByte).copy_(
        (data.to(at::kFloat) * 2).clamp(-448, 448).to(at::kFloat8_e4m3fn).view(at::kByte));
    const Tensor code = out[i + 1].view(at::kByte);
    code.copy_(at::where((code > 0) & (code < kE8m0Nan), code - 1, code));
  }
}

std::optional<Block> transposed(const std::optional<Block>& block) {
  return block ? std::optional(Block{block->cols, block->rows}) : std::nullopt;
}
bool is_block(const std::optional<Block>& block) {
  return !block || std::find(std::begin(kBlocks), std::end(kBlocks), *block) != std::end(kBlocks);
}

// Quantizes weights that are a transposed view in the order in which they are stored, without a
// copy: the rowwise form of w is the colwise form of its transpose. Returns false, having done
// nothing, for other weights.
bool run_transposed(const Tensor& w, QuantizeSpec spec, const std::vector<Tensor>& out);

void run(const Tensor& tensor, const OptionalTensor& ends, const QuantizeSpec& spec,
         const std::vector<Tensor>& out) {
  if (tensor.is_meta() || run_transposed(tensor, spec, out)) return;
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
    return RowScaleOut{qdata, view<float>(*next++)};
  };
  if (spec.rowwise) args.rowwise = operand();
  if (spec.colwise) args.colwise = operand();
  quantize_row_scale(args, scope.exec());
}

bool run_transposed(const Tensor& w, QuantizeSpec spec, const std::vector<Tensor>& out) {
  if (w.dim() != 3 || w.is_contiguous() || !w.mT().is_contiguous()) return false;
  const bool both = spec.rowwise && spec.colwise;
  spec = {.scaling = spec.scaling,
          .rowwise = transposed(spec.colwise),
          .colwise = transposed(spec.rowwise),
          .rule = spec.rule,
          .layout = spec.layout,
          .scales_too_small = spec.scales_too_small};
  // A transposed block may be none of kBlocks: 128x32 would become 32x128.
  if (!is_block(spec.rowwise) || !is_block(spec.colwise)) return false;
  run(w.mT(), {}, spec, both ? std::vector{out[2], out[3], out[0], out[1]} : out);
  return true;
}

}  // namespace

Results forms_results(const FormsArgs& args) {
  const auto& [op, x, offs, spec] = args;
  const bool by_row = spec.scaling == Scaling::kRow;
  TORCH_CHECK_VALUE(spec.scaling != Scaling::kNone && (spec.rowwise || spec.colwise), op,
                    ": a spec must scale rows or blocks, and ask for a form");
  const auto dtype = by_row ? at::kFloat : at::kFloat8_e8m0fnu;
  Results results;
  results.reserve(4);
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
  TORCH_CHECK_VALUE(spec.scaling == Scaling::kBlock, "quantize: fused quantizers scale blocks");
  QuantizeForms forms{.offs = offs_view(offs), .rule = spec.rule};
  auto next = out.begin();
  const auto operand = [&](Block block) {
    const auto qdata = view<e4m3>(*next++);
    return QuantizedOut{block, spec.layout, qdata, view<e8m0>(*next++)};
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

QuantizeSpec parse_forms(const char* op, const QuantizeText& text) {
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

// Parses the text arguments of quantize_rowwise or quantize_colwise.
template <Form kForm>
QuantizeSpec parse_form_of(Text block, Text rule, Text layout) {
  if constexpr (kForm == Form::kRowwise) return parse_forms(kRowwiseOp, {block, {}, rule, layout});
  return parse_forms(kColwiseOp, {{}, block, rule, layout});
}
template <Form kForm>
constexpr const char* kOneFormOp = kForm == Form::kRowwise ? kRowwiseOp : kColwiseOp;

template <Form kForm>
Two quantize_one(const Tensor& x, const OptionalTensor& offs, Text block, Text rule, Text layout) {
  constexpr const char* kOp = kOneFormOp<kForm>;
  return with_op(
      kOp, [&] { return two(quantize(kOp, x, offs, parse_form_of<kForm>(block, rule, layout))); });
}

template <Form kForm>
void quantize_one_out(const Tensor& x, const OptionalTensor& offs, Text block, Text rule,
                      Text layout, const Tensor& qdata, const Tensor& scale) {
  constexpr const char* kOp = kOneFormOp<kForm>;
  with_op(kOp, [&] {
    quantize_into(kOp, x, offs, parse_form_of<kForm>(block, rule, layout), {qdata, scale});
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

template <Form kForm>
constexpr const char* kRowScaleOp = kForm == Form::kRowwise ? kPerRowOp : kPerColOp;
template <Form kForm>
constexpr QuantizeSpec kRowScaleSpec = kForm == Form::kRowwise ? kPerRow : kPerCol;

template <Form kForm>
Two quantize_row_scaled(const Tensor& x, const OptionalTensor& offs) {
  constexpr const char* kOp = kRowScaleOp<kForm>;
  return with_op(kOp, [&] { return two(quantize(kOp, x, offs, kRowScaleSpec<kForm>)); });
}

template <Form kForm>
void quantize_row_scaled_out(const Tensor& x, const OptionalTensor& offs, const Tensor& qdata,
                             const Tensor& scale) {
  constexpr const char* kOp = kRowScaleOp<kForm>;
  with_op(kOp, [&] { quantize_into(kOp, x, offs, kRowScaleSpec<kForm>, {qdata, scale}); });
}

std::vector<Tensor> quantize_packed(const Tensor& x, const OptionalTensor& offs, int64_t spec) {
  constexpr const char* kOp = "quantize";
  return with_op(kOp, [&] { return quantize(kOp, x, offs, unpack<QuantizeSpec>(spec, kOp)); });
}

void register_ops(torch::Library& m) {
  m.impl("quantize_rowwise", TORCH_FN(quantize_one<Form::kRowwise>));
  m.impl("quantize_rowwise.out", TORCH_FN(quantize_one_out<Form::kRowwise>));
  m.impl("quantize_colwise", TORCH_FN(quantize_one<Form::kColwise>));
  m.impl("quantize_colwise.out", TORCH_FN(quantize_one_out<Form::kColwise>));
  m.impl("quantize_both", TORCH_FN(quantize_both));
  m.impl("quantize_both.out", TORCH_FN(quantize_both_out));
  m.impl("quantize_per_row", TORCH_FN(quantize_row_scaled<Form::kRowwise>));
  m.impl("quantize_per_row.out", TORCH_FN(quantize_row_scaled_out<Form::kRowwise>));
  m.impl("quantize_per_col", TORCH_FN(quantize_row_scaled<Form::kColwise>));
  m.impl("quantize_per_col.out", TORCH_FN(quantize_row_scaled_out<Form::kColwise>));
  m.impl("_quantize", TORCH_FN(quantize_packed));
}

}  // namespace

MOXIE_REGISTER_OPS(register_ops)

}  // namespace moxie::ops
