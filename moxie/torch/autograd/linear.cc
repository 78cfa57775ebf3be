#include "moxie/torch/autograd/linear.h"

#include "moxie/torch/ops.h"

namespace moxie::ops {
namespace {

bool same(const c10::SymInt& a, const c10::SymInt& b) {
  return a.sym_eq(b).expect_true(__FILE__, __LINE__);
}

// Inductor takes no op that writes one argument while another is e8m0; in a graph the sum is a step
// of its own, which it fuses as it likes.
bool is_traced(const Tensor& tensor) {
  const auto keys = tensor.unsafeGetTensorImpl()->key_set();
  return keys.has(c10::DispatchKey::Python) || keys.has(c10::DispatchKey::Functionalize);
}

void check_values(const Plan& plan, const Input& input) {
  if (!plan.recipe.keeps_dtype) check_float(input);
}

void check_quantized_w(const Plan& plan, const WeightArgs& args) {
  if (!args.quantized_w) return;
  const char *op = args.names.op, *name = args.names.quantized_w;
  TORCH_CHECK_VALUE(plan.recipe.quantizes(), op, ": this recipe quantizes nothing, so ", name,
                    " must not be given");
  TORCH_CHECK_VALUE(args.quantized_w->size() == 4, op, ": ", name,
                    " must be the four tensors of quantize_weights (qdata, scale, qdata_t, "
                    "scale_t), got ",
                    args.quantized_w->size());
  Plan as_given = plan;
  const auto& given = *args.quantized_w;
  as_given.layout = layout_of_weights(plan, {{given[0], given[1]}, {given[2], given[3]}});
  const Results expected = quantized_weights_results(as_given, args.w);
  const char* parts[] = {"w", "w_scale", "w_t", "w_scale_t"};
  for (size_t i = 0; i < expected.size(); ++i) {
    const Input part{op, parts[i], args.quantized_w->at(i)};
    if (i % 2 == 0)
      check_e4m3(part);
    else
      check_scale(part, plan.recipe.scaling);
    check_shape(part, expected[i].shape);
    check_device(part, args.w);
  }
}

void check_main_grad(const Plan& plan, const WeightArgs& args) {
  if (!args.main_grad) return;
  const Tensor& main_grad = *args.main_grad;
  const Input input{args.names.op, args.names.main_grad, main_grad};
  TORCH_CHECK_TYPE(main_grad.scalar_type() == at::kFloat || plan.recipe.keeps_dtype, input.op, ": ",
                   input.name, " must be torch.float32, got ", dtype_name(main_grad.scalar_type()));
  check_shape(input, sym_shape(args.w));
  check_device(input, args.w);
  TORCH_CHECK_VALUE(!main_grad.requires_grad(), input.op, ": ", input.name,
                    " must not require grad");
  TORCH_CHECK_VALUE(main_grad.is_contiguous(), input.op, ": ", input.name,
                    " is added to in place and must be contiguous, got strides ",
                    main_grad.sym_strides());
}

// Where the host can read them.
void check_ends(const char* op, const OptionalTensor& offs, const Tensor& x, int64_t top_k) {
  check_offs(op, offs, x);
  if (!offs || !offs->is_cpu() || is_traced(*offs)) return;
  const Tensor ends = dense(*offs);
  moxie::check_offs(op, const_view<int32_t>(ends), x.size(0) * top_k, "rows", Backend::kCpu);
}

}  // namespace

void check_weight(const Plan& plan, const WeightArgs& args) {
  check_values(plan, {args.names.op, args.names.w, args.w});
  check_quantized_w(plan, args);
  check_main_grad(plan, args);
}

void check_linear(const Plan& plan, const LinearArgs& args, const LinearNames& names,
                  const OptionalTensor& main_grad) {
  const auto& [x, w, offs, bias, quantized_w, dtype, needs_dx, needs_dw, mx, forms, top_k] = args;
  const char* op = names.op;
  check_values(plan, {op, "x", x});
  TORCH_CHECK_VALUE(x.dim() == 2, op, ": x must be [rows, k], got ", x.dim(), " dims");
  TORCH_CHECK_VALUE(same(x.sym_size(1), w.sym_size(2)), op, ": x has ", x.sym_size(1),
                    " columns, and ", names.w, " contracts ", w.sym_size(2));
  if (mx) check_mx(plan, op, *mx);
  check_device({op, names.w, w}, x);
  check_ends(op, offs, x, top_k);
  const c10::SymInt groups = num_groups(offs).value_or(1);
  TORCH_CHECK_VALUE(same(w.sym_size(0), groups), op, ": ", names.w, " has ", w.sym_size(0),
                    " matrices for ", groups, " groups");
  if (bias) {
    check_values(plan, {op, "bias", *bias});
    check_device({op, "bias", *bias}, x);
    check_shape({op, "bias", *bias},
                bias->dim() == 2 ? SymShape(groups, w.sym_size(1)) : SymShape(w.sym_size(1)));
  }
  if (dtype && !plan.recipe.keeps_dtype) high_precision(dtype, op);
  check_weight(plan, {names, w, quantized_w, main_grad});
}

Need need_of_x(const Plan& plan, const LinearArgs& args) {
  const bool colwise =
      args.needs_dw && !args.mx && saves_colwise(plan.recipe, args.num_rows(), args.w.sym_size(0));
  return colwise ? Need::kBoth : Need::kRowwise;
}

LinearStep linear_forward(const Plan& plan, const LinearArgs& args) {
  const Recipe& recipe = plan.recipe;
  const Need need = need_of_x(plan, args);
  const bool colwise = need == Need::kBoth;
  Forms x;
  if (args.forms)
    x = *args.forms;
  else if (args.mx)
    x = {rowwise_mx(plan, *args.mx, args.offs), {}};
  else
    x = quantize_tokens(plan, args.x, args.offs, Role::kX, need);
  Forms w;
  if (!args.quantized_w)
    w = quantize_weights(plan, args.w, args.needs_dx ? Need::kBoth : Need::kRowwise);
  else
    w = {{args.quantized_w->at(0), args.quantized_w->at(1)},
         {args.quantized_w->at(2), args.quantized_w->at(3)}};
  const auto dtype = args.dtype.value_or(recipe.out.value_or(args.x.scalar_type()));
  GemmOptions options{.offs = args.offs, .recipe = plan.text, .bias = args.bias, .dtype = dtype};
  if (!args.mx) options.scale_layout = name(plan.layout);
  LinearStep step;
  step.y = grouped_mm_quantized(x.rowwise.data, x.rowwise.scale, w.rowwise.data, w.rowwise.scale,
                                options);
  if (args.needs_dw) {
    const bool keeps_x = !colwise && recipe.scaling == Scaling::kRow;
    if (args.mx)
      step.saved.x = {args.mx->qdata, args.mx->scale};
    else
      step.saved.x = colwise ? x.colwise : keeps_x ? Quantized{args.x, {}} : x.rowwise;
  }
  if (args.needs_dx) step.saved.w_t = w.colwise;
  return step;
}

LinearGrads linear_backward(const Plan& plan, const LinearGradArgs& args) {
  LinearGrads grads;
  if (!args.needs_dx && !args.needs_dw) return grads;
  const Need need = !args.needs_dw ? Need::kRowwise : !args.needs_dx ? Need::kColwise : Need::kBoth;
  const Forms dy =
      args.forms ? *args.forms : quantize_tokens(plan, args.dy, args.offs, Role::kDy, need);
  const GemmOptions options{
      .offs = args.offs, .recipe = plan.text, .scale_layout = name(plan.layout)};
  if (args.needs_dx) {
    GemmOptions in = options;
    in.dtype = args.x_dtype;
    const Quantized& w_t = args.saved.w_t;
    grads.dx = grouped_dgrad(dy.rowwise.data, dy.rowwise.scale, w_t.data, w_t.scale, in);
  }
  if (args.needs_dw) {
    const c10::SymInt rows = args.dy.sym_size(0);
    Quantized x = args.saved.x;
    if (args.mx_block)
      x = colwise_mx(plan, x, *args.mx_block, args.offs);
    else if (!saves_colwise(plan.recipe, rows, args.num_groups))
      x = requantize_tokens(plan, x, args.offs);
    if (args.main_grad && !is_traced(args.dy)) {
      grouped_wgrad_add_(*args.main_grad, dy.colwise.data, dy.colwise.scale, x.data, x.scale, rows,
                         options);
    } else {
      GemmOptions in = options;
      in.dtype = args.main_grad ? args.main_grad->scalar_type() : args.w_dtype;
      grads.dw = grouped_wgrad(dy.colwise.data, dy.colwise.scale, x.data, x.scale, rows, in);
    }
    if (args.main_grad && grads.dw.defined()) {
      args.main_grad->add_(grads.dw);
      grads.dw = Tensor();
    }
  }
  return grads;
}

void pack_saved(torch::autograd::variable_list& list, const LinearSaved& saved) {
  for (const Quantized* form : {&saved.x, &saved.w_t}) {
    list.push_back(form->data);
    list.push_back(form->scale.value_or(Tensor()));
  }
}

LinearSaved unpack_saved(const torch::autograd::variable_list& list, size_t first) {
  return {{list[first], defined(list[first + 1])}, {list[first + 2], defined(list[first + 3])}};
}

}  // namespace moxie::ops
