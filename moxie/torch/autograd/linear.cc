#include "moxie/torch/autograd/linear.h"

#include "moxie/torch/ops.h"

namespace moxie::ops {
namespace {

void check_quantized_w(const LinearArgs& args) {
  TORCH_CHECK_VALUE(!args.quantized_w || args.quantized_w->size() == 4, args.op,
                    ": quantized_w must be the four tensors of quantize_weights (qdata, scale, "
                    "qdata_t, scale_t), got ",
                    args.quantized_w->size());
}

bool same(const c10::SymInt& a, const c10::SymInt& b) {
  return a.sym_eq(b).expect_true(__FILE__, __LINE__);
}

// Inductor takes no op that writes one argument while another is e8m0; in a graph the sum is a step
// of its own, which it fuses as it likes.
bool is_traced(const Tensor& tensor) {
  const auto keys = tensor.unsafeGetTensorImpl()->key_set();
  return keys.has(c10::DispatchKey::Python) || keys.has(c10::DispatchKey::Functionalize);
}

}  // namespace

void check_linear(const LinearArgs& args) {
  const auto& [op, x, w, offs, bias, quantized_w, dtype, needs_dx, needs_dw] = args;
  TORCH_CHECK_VALUE(x.dim() == 2, op, ": x must be [rows, k], got ", x.dim(), " dims");
  TORCH_CHECK_VALUE(w.dim() == 3, op, ": w must be [groups, n, k], got ", w.dim(), " dims");
  TORCH_CHECK_VALUE(same(x.sym_size(1), w.sym_size(2)), op, ": x has ", x.sym_size(1),
                    " columns, and w contracts ", w.sym_size(2));
  check_device({op, "w", w}, x);
  check_offs(op, offs, x);
  const c10::SymInt groups = num_groups(offs).value_or(1);
  TORCH_CHECK_VALUE(same(w.sym_size(0), groups), op, ": w has ", w.sym_size(0), " matrices for ",
                    groups, " groups");
  if (bias) {
    check_device({op, "bias", *bias}, x);
    check_shape({op, "bias", *bias},
                bias->dim() == 2 ? SymShape(groups, w.sym_size(1)) : SymShape(w.sym_size(1)));
  }
  check_quantized_w(args);
}

LinearStep linear_forward(const Plan& plan, const LinearArgs& args) {
  const Recipe& recipe = plan.recipe;
  const bool colwise =
      args.needs_dw && saves_colwise(recipe, args.x.sym_size(0), args.w.sym_size(0));
  const Forms x =
      quantize_tokens(plan, args.x, args.offs, Role::kX, colwise ? Need::kBoth : Need::kRowwise);
  Forms w;
  if (!args.quantized_w)
    w = quantize_weights(plan, args.w, args.needs_dx ? Need::kBoth : Need::kRowwise);
  else
    w = {{args.quantized_w->at(0), args.quantized_w->at(1)},
         {args.quantized_w->at(2), args.quantized_w->at(3)}};
  const auto dtype = args.dtype.value_or(recipe.out.value_or(args.x.scalar_type()));
  LinearStep step;
  step.y = grouped_mm_quantized(
      x.rowwise.data, x.rowwise.scale, w.rowwise.data, w.rowwise.scale,
      {.offs = args.offs, .recipe = plan.text, .bias = args.bias, .dtype = dtype});
  if (args.needs_dw) step.saved.x = colwise ? x.colwise : x.rowwise;
  if (args.needs_dx) step.saved.w_t = w.colwise;
  return step;
}

LinearGrads linear_backward(const Plan& plan, const LinearGradArgs& args) {
  LinearGrads grads;
  if (!args.needs_dx && !args.needs_dw) return grads;
  const Need need = !args.needs_dw ? Need::kRowwise : !args.needs_dx ? Need::kColwise : Need::kBoth;
  const Forms dy = quantize_tokens(plan, args.dy, args.offs, Role::kDy, need);
  const GemmOptions options{.offs = args.offs, .recipe = plan.text};
  if (args.needs_dx) {
    GemmOptions in = options;
    in.dtype = args.x_dtype;
    const Quantized& w_t = args.saved.w_t;
    grads.dx = grouped_dgrad(dy.rowwise.data, dy.rowwise.scale, w_t.data, w_t.scale, in);
  }
  if (args.needs_dw) {
    const c10::SymInt rows = args.dy.sym_size(0);
    Quantized x = args.saved.x;
    if (!saves_colwise(plan.recipe, rows, args.num_groups))
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
