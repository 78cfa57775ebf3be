#include "moxie/torch/autograd/linear.h"

#include "moxie/core/layout/parse.h"
#include "moxie/torch/ops.h"

namespace moxie::ops {
namespace {

// Whether w is a transposed view: its matrices are stored as [in, out].
bool is_transposed(const Tensor& w) { return w.dim() == 3 && w.mT().is_contiguous(); }

// Whether w is a parameter or a view of one. Other weights are made for the call, such as the sum
// of a weight and an adapter's update, or stand for a shard, whose changes autograd does not see.
// In a graph that is being traced nothing tells them apart, and its partitioner decides what is
// kept.
bool is_parameter(const Tensor& w) {
  return is_traced(w) || w.is_leaf() || (w.is_view() && w._base().is_leaf());
}

void check_values(const Recipe& recipe, const Input& input) {
  if (!recipe.keeps_dtype) check_float(input);
}

void check_quantized_w(const Recipe& recipe, const WeightArgs& args) {
  if (!args.quantized_w) return;
  const char *op = args.names.op, *name = args.names.quantized_w;
  TORCH_CHECK_VALUE(recipe.quantizes(), op, ": this recipe quantizes nothing, so ", name,
                    " must not be given");
  TORCH_CHECK_VALUE(args.quantized_w->size() == 4, op, ": ", name,
                    " must be the four tensors of quantize_weights (qdata, scale, qdata_t, "
                    "scale_t), got ",
                    args.quantized_w->size());
}

void check_main_grad(const Recipe& recipe, const WeightArgs& args) {
  if (!args.main_grad) return;
  const Tensor& main_grad = *args.main_grad;
  const Input input{args.names.op, args.names.main_grad, main_grad};
  TORCH_CHECK_TYPE(main_grad.scalar_type() == at::kFloat || recipe.keeps_dtype, input.op, ": ",
                   input.name, " must be torch.float32, got ", dtype_name(main_grad.scalar_type()));
  check_shape(input, sym_shape(args.w));
  check_device(input, args.w);
  TORCH_CHECK_VALUE(!main_grad.requires_grad(), input.op, ": ", input.name,
                    " must not require grad");
  const bool transposed = is_transposed(args.w) && is_transposed(main_grad);
  TORCH_CHECK_VALUE(main_grad.is_contiguous() || transposed, input.op, ": ", input.name,
                    " is added to in place and must be contiguous, or transposed where ",
                    args.names.w, " is, got strides ", main_grad.sym_strides());
}

// Checks the values of offs, if the host can read them.
void check_ends(const char* op, const OptionalTensor& offs, const Tensor& x, int64_t top_k) {
  check_offs(op, offs, x);
  if (!offs || !offs->is_cpu() || is_traced(*offs)) return;
  const Tensor ends = dense(*offs);
  moxie::check_offs(op, const_view<int32_t>(ends), x.size(0) * top_k, "rows", Backend::kCpu);
}

}  // namespace

void check_weight(const Recipe& recipe, const WeightArgs& args) {
  TORCH_CHECK_VALUE(args.w.dim() == 3, args.names.op, ": ", args.names.w,
                    " must be [groups, n, k], got ", args.w.dim(), " dims");
  check_values(recipe, {args.names.op, args.names.w, args.w});
  check_quantized_w(recipe, args);
  check_main_grad(recipe, args);
}

void check_linear(const Recipe& recipe, const LinearArgs& args, const LinearNames& names,
                  const OptionalTensor& main_grad) {
  const Tensor &x = args.x, &w = args.w;
  const char* op = names.op;
  check_weight(recipe, {names, w, args.quantized_w, main_grad});
  check_values(recipe, {op, "x", x});
  TORCH_CHECK_VALUE(x.dim() == 2, op, ": x must be [rows, k], got ", x.dim(), " dims");
  TORCH_CHECK_VALUE(same(x.sym_size(1), w.sym_size(2)), op, ": x has ", x.sym_size(1),
                    " columns, and ", names.w, " contracts ", w.sym_size(2));
  if (args.mx) check_quantized_x(recipe, op, *args.mx);
  check_device({op, names.w, w}, x);
  check_ends(op, args.offs, x, args.top_k);
  const c10::SymInt groups = num_groups(args.offs).value_or(1);
  TORCH_CHECK_VALUE(same(w.sym_size(0), groups), op, ": ", names.w, " has ", w.sym_size(0),
                    " matrices for ", groups, " groups");
  if (args.bias) {
    const Input bias{op, "bias", *args.bias};
    check_values(recipe, bias);
    check_device(bias, x);
    check_shape(bias,
                args.bias->dim() == 2 ? SymShape(groups, w.sym_size(1)) : SymShape(w.sym_size(1)));
  }
  if (args.dtype && !recipe.keeps_dtype) high_precision(args.dtype, op);
}

PlanArgs plan_args(const Recipe& recipe, const LinearArgs& args, const LinearNeeds& needs) {
  const auto x = args.x.scalar_type();
  PlanArgs problem{.recipe = recipe,
                   .device = device_behind(args.w),
                   .rows = args.x.sym_size(0) * args.top_k,
                   .groups = args.w.sym_size(0),
                   .n = args.w.sym_size(1),
                   .k = args.w.sym_size(2),
                   .has_offs = args.offs.has_value(),
                   .x = x,
                   .y = args.dtype.value_or(recipe.out.value_or(x)),
                   .dx = x,
                   .dw = args.w.scalar_type(),
                   .needs_dx = needs.dx,
                   .needs_dw = needs.dw,
                   .cached_w = args.quantized_w.has_value(),
                   .w_stays = is_parameter(args.w)};
  if (needs.main_grad) {
    problem.dw = needs.main_grad->scalar_type();
    // The wgrad op adds to main_grad itself, except in two cases, where an op of its own adds: in a
    // traced graph, because inductor rejects an op that writes one argument while another is e8m0,
    // and if main_grad is a transposed view.
    problem.adds_to_main_grad = !is_traced(args.x) && needs.main_grad->is_contiguous();
  }
  if (args.mx) problem.quantized_x = parse_block(args.mx->block, "x", "block");
  return problem;
}

void take_quantized_w(Plan& plan, const WeightArgs& args) {
  if (!args.quantized_w) return;
  const auto& given = *args.quantized_w;
  plan.w_layout = layout_by_shape(plan.recipe, plan.kernel(Pass::kForward),
                                  {given[0], given[1], given[2], given[3]});
  const QuantizeSpec spec = weights_spec(plan.recipe, plan.w_layout, Need::kBoth);
  const Results expected = forms_results({args.names.op, sym_shape(args.w), {}, spec});
  const char* parts[] = {"w", "w_scale", "w_t", "w_scale_t"};
  for (size_t i = 0; i < expected.size(); ++i) {
    const Input part{args.names.op, parts[i], given[i]};
    if (i % 2 == 0)
      check_e4m3(part);
    else
      check_scale(part, plan.recipe.scaling);
    check_shape(part, expected[i].shape);
    check_device(part, args.w);
  }
}

Need need_of_x(const Plan& plan) {
  const bool colwise = plan.kept_x == KeptX::kColwise || plan.kept_x == KeptX::kHighPrecision;
  return colwise ? Need::kBoth : Need::kRowwise;
}

LinearStep linear_forward(const Plan& plan, const LinearArgs& args) {
  QuantizedForms x, w;
  if (args.forms)
    x = *args.forms;
  else if (args.mx)
    x.rowwise = rowwise_of_quantized_x(plan, {args.mx->qdata, args.mx->scale}, args.offs);
  else
    x = quantize_tokens({plan, args.offs, Role::kX, need_of_x(plan)}, args.x);
  if (args.quantized_w)
    w = {{args.quantized_w->at(0), args.quantized_w->at(1)},
         {args.quantized_w->at(2), args.quantized_w->at(3)}};
  else
    w = quantize_weights(plan, args.w,
                         plan.kept_w == KeptW::kTransposed ? Need::kBoth : Need::kRowwise);
  LinearStep step;
  const auto dtype = args.dtype.value_or(plan.recipe.out.value_or(args.x.scalar_type()));
  step.y = packed::grouped_mm(x.rowwise.data, x.rowwise.scale, w.rowwise.data, w.rowwise.scale,
                              args.offs, pack(pass_of(plan, Pass::kForward)), args.bias, dtype);
  if (plan.kept_x == KeptX::kQuantizedX)
    step.saved.x = {args.mx->qdata, args.mx->scale};
  else if (plan.kept_x != KeptX::kNothing)
    step.saved.x = x.colwise;
  if (plan.kept_w == KeptW::kTransposed) step.saved.w = w.colwise;
  if (plan.kept_w == KeptW::kItself) step.saved.w = {args.w, {}};
  return step;
}

Quantized dgrad_weights(const Plan& plan, const Quantized& saved) {
  if (plan.kept_w != KeptW::kItself) return saved;
  return quantize_weights(plan, saved.data, Need::kColwise).colwise;
}

Tensor linear_dgrad(const Plan& plan, const Quantized& dy, const Quantized& w_t,
                    const OptionalTensor& offs, at::ScalarType dtype) {
  return packed::grouped_dgrad(dy.data, dy.scale, w_t.data, w_t.scale, offs,
                               pack(pass_of(plan, Pass::kDgrad)), dtype);
}

Tensor linear_wgrad(const Plan& plan, const WgradArgs& args) {
  const auto& [dy_t, x_t, rows, offs, main_grad, w_dtype] = args;
  const int64_t pass = pack(pass_of(plan, Pass::kWgrad));
  if (main_grad && !is_traced(dy_t.data) && main_grad->is_contiguous()) {
    packed::grouped_wgrad_add_(*main_grad, dy_t.data, dy_t.scale, x_t.data, x_t.scale, rows, offs,
                               pass);
    return {};
  }
  const auto dtype = main_grad ? main_grad->scalar_type() : w_dtype;
  const Tensor dw =
      packed::grouped_wgrad(dy_t.data, dy_t.scale, x_t.data, x_t.scale, rows, offs, pass, dtype);
  if (!main_grad) return dw;
  main_grad->add_(dw);
  return {};
}

Need need_of_dy(bool needs_dx, bool needs_dw) {
  return !needs_dw ? Need::kRowwise : !needs_dx ? Need::kColwise : Need::kBoth;
}

LinearGrads linear_backward(const Plan& plan, const LinearGradArgs& args) {
  LinearGrads grads;
  if (!args.needs_dx && !args.needs_dw) return grads;
  const Need need = need_of_dy(args.needs_dx, args.needs_dw);
  const QuantizedForms dy = quantize_tokens({plan, args.offs, Role::kDy, need}, args.dy);
  if (args.needs_dx)
    grads.dx =
        linear_dgrad(plan, dy.rowwise, dgrad_weights(plan, args.saved.w), args.offs, args.x_dtype);
  if (!args.needs_dw) return grads;
  Quantized x = args.saved.x;
  if (plan.kept_x == KeptX::kQuantizedX) x = colwise_of_quantized_x(plan, x, args.offs);
  grads.dw = linear_wgrad(plan, {.dy_t = dy.colwise,
                                 .x_t = x,
                                 .rows = args.dy.sym_size(0),
                                 .offs = args.offs,
                                 .main_grad = args.main_grad,
                                 .w_dtype = args.w_dtype});
  return grads;
}

void pack_saved(torch::autograd::variable_list& list, const LinearSaved& saved) {
  for (const Quantized* form : {&saved.x, &saved.w}) {
    list.push_back(form->data);
    list.push_back(form->scale.value_or(Tensor()));
  }
}

LinearSaved unpack_saved(const torch::autograd::variable_list& list, size_t first) {
  return {{list[first], defined(list[first + 1])}, {list[first + 2], defined(list[first + 3])}};
}

}  // namespace moxie::ops
