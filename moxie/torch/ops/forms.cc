#include "moxie/torch/ops/forms.h"

#include "moxie/core/layout/parse.h"

namespace moxie::ops {

FormsRequest parse_forms(const char* op, const SymShape& x, const OptionalTensor& offs,
                         const FormsText& text) {
  const bool both = text.rowwise && text.colwise;
  FormsRequest request{
      op, x, offs, {}, {}, parse_rule(text.rule, op), parse_layout(text.layout, op)};
  if (text.rowwise)
    request.rowwise = parse_block(*text.rowwise, op, both ? "rowwise_block" : "block");
  if (text.colwise)
    request.colwise = parse_block(*text.colwise, op, both ? "colwise_block" : "block");
  return request;
}

Results forms_results(const FormsRequest& request) {
  Results results;
  const auto add = [&](Form form, Block block, const char* qdata, const char* scale) {
    check_block(request.op, form, block, request.offs);
    check_layout(request.op, form, block, request.layout);
    const auto shape =
        operand_shape(request.x, num_groups(request.offs), form, block, request.layout);
    results.push_back({qdata, at::kFloat8_e4m3fn, shape.qdata});
    results.push_back({scale, at::kFloat8_e8m0fnu, shape.scale});
  };
  if (request.rowwise) add(Form::kRowwise, *request.rowwise, "qdata", "scale");
  if (request.colwise) add(Form::kColwise, *request.colwise, "qdata_t", "scale_t");
  return results;
}

QuantizeForms forms_in(const FormsRequest& request, const OptionalTensor& offs,
                       const std::vector<Tensor>& out) {
  QuantizeForms forms{.offs = offs_view(offs), .rule = request.rule};
  auto next = out.begin();
  const auto operand = [&](Block block) {
    const auto qdata = view<e4m3>(*next++);
    return Operand{block, request.layout, qdata, view<e8m0>(*next++)};
  };
  if (request.rowwise) forms.rowwise = operand(*request.rowwise);
  if (request.colwise) forms.colwise = operand(*request.colwise);
  return forms;
}

}  // namespace moxie::ops
