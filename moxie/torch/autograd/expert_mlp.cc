// expert_mlp: w13, SwiGLU and w2 as one node, so that what lies between them can stay in FP8, and
// so can the rows of tokens that are yet to be permuted. In plain form: the same ops as the chain
// permute, grouped_mm, swiglu, grouped_mm, and the same bytes.
#include <torch/library.h>

#include "moxie/torch/autograd/linear.h"
#include "moxie/torch/ops.h"

namespace moxie::ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr const char* kOp = "expert_mlp";

// Positions of the arguments of apply(), which the gradients follow.
enum Argument : size_t { kX, kW13, kW2, kMainGrad13, kMainGrad2, kCall, kArguments };
// Of what is saved; that of the two linears follows.
enum Saved : size_t { kOffs, kH, kSlotOf, kRowOf, kLinears };

struct Call {
  MlpPlan plan;
  const ExpertMlpOptions& options;

  Permutation permutation() const { return {options.slot_of, options.row_of, options.top_k}; }
};

struct Steps {
  LinearStep up, down;  // w13 and w2
};

LinearStep run_up(const Tensor& x, const Tensor& w13, const Call& call) {
  const Plan& plan = call.plan.up;
  const ExpertMlpOptions& options = call.options;
  const auto args = [&](const Tensor& from) -> LinearArgs {
    return {.x = from, .w = w13, .offs = options.offs, .quantized_w = options.quantized_w13};
  };
  if (!options.slot_of) return linear_forward(plan, args(x));
  const Need need = need_of_x(plan);
  if (!fuses(plan, need)) {
    const Tensor rows = permute(x, *options.slot_of, *options.row_of, options.top_k);
    return linear_forward(plan, args(rows));
  }
  const QuantizedForms forms = quantize_permuted(plan, x, call.permutation(), options.offs, need);
  LinearArgs of_tokens = args(x);
  of_tokens.forms = &forms;
  return linear_forward(plan, of_tokens);
}

LinearStep run_down(const Tensor& h, const Tensor& w2, const Call& call) {
  const Plan& plan = call.plan.down;
  const ExpertMlpOptions& options = call.options;
  const auto args = [&](const Tensor& from) -> LinearArgs {
    return {.x = from, .w = w2, .offs = options.offs, .quantized_w = options.quantized_w2};
  };
  const Need need = need_of_x(plan);
  if (!fuses(plan, need)) {
    const Tensor a = swiglu(h);
    return linear_forward(plan, args(a));
  }
  const QuantizedForms forms = quantize_swiglu(plan, h, options.offs, need);
  LinearArgs of_h = args(h);
  of_h.forms = &forms;
  return linear_forward(plan, of_h);
}

Steps run_forward(const Tensor& x, const Tensor& w13, const Tensor& w2, const Call& call) {
  Steps steps;
  steps.up = run_up(x.to(call.options.x_dtype.value_or(x.scalar_type())), w13, call);
  steps.down = run_down(steps.up.y, w2, call);
  return steps;
}

struct ExpertMlp : torch::autograd::Function<ExpertMlp> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& w13, const Tensor& w2,
                        const OptionalTensor& main_grad13, const OptionalTensor& main_grad2,
                        const Call* call) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const Steps steps = run_forward(x, w13, w2, *call);
    const ExpertMlpOptions& options = call->options;
    variable_list saved(kLinears);
    saved[kOffs] = options.offs.value_or(Tensor());
    if (call->plan.down.keeps_w_t) saved[kH] = steps.up.y;  // where there is a dh
    if (call->plan.up.keeps_w_t && options.slot_of) {
      saved[kSlotOf] = *options.slot_of;
      saved[kRowOf] = *options.row_of;
    }
    pack_saved(saved, steps.up.saved);
    pack_saved(saved, steps.down.saved);
    ctx->save_for_backward(saved);
    auto& data = ctx->saved_data;
    // Not as saved variables: they are written between forward and backward, and hooks may copy
    // those.
    if (main_grad13) data["main_grad13"] = *main_grad13;
    if (main_grad2) data["main_grad2"] = *main_grad2;
    data["plan13"] = pack(call->plan.up);
    data["plan2"] = pack(call->plan.down);
    data["num_tokens"] = x.sym_size(0);
    data["x_dtype"] = x.scalar_type();
    data["rows_dtype"] = options.x_dtype.value_or(x.scalar_type());
    data["h_dtype"] = steps.up.y.scalar_type();
    data["w13_dtype"] = w13.scalar_type();
    data["w2_dtype"] = w2.scalar_type();
    return steps.down.y;
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    variable_list out(kArguments);
    const Tensor& dy = grads[0];
    if (!dy.defined()) return out;
    const variable_list saved = saved_for_backward(ctx, kOp);
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const OptionalTensor offs = defined(saved[kOffs]);
    const Tensor& h = saved[kH];
    auto& data = ctx->saved_data;
    const Plan plan13 = unpack<Plan>(data["plan13"].toInt(), kOp);
    const Plan plan2 = unpack<Plan>(data["plan2"].toInt(), kOp);
    const bool needs_dx = ctx->needs_input_grad(kX), needs_dw13 = ctx->needs_input_grad(kW13);
    const LinearSaved up = unpack_saved(saved, kLinears),
                      down = unpack_saved(saved, kLinears + kLinearSavedCount);
    const LinearGrads below = linear_backward(plan2, {.dy = dy,
                                                      .saved = down,
                                                      .offs = offs,
                                                      .main_grad = find_tensor(data, "main_grad2"),
                                                      .x_dtype = data["h_dtype"].toScalarType(),
                                                      .w_dtype = data["w2_dtype"].toScalarType(),
                                                      .needs_dx = needs_dx || needs_dw13,
                                                      .needs_dw = ctx->needs_input_grad(kW2)});
    out[kW2] = below.dw;
    if (!needs_dx && !needs_dw13) return out;
    Tensor dh = h;
    std::optional<QuantizedForms> forms;
    if (needs_dx && needs_dw13 && fuses(plan2, Need::kBoth))
      forms = quantize_swiglu_backward(plan13, below.dx, h, offs);
    else
      dh = swiglu_backward(below.dx, h);
    const LinearGrads above =
        linear_backward(plan13, {.dy = dh,
                                 .saved = up,
                                 .offs = offs,
                                 .main_grad = find_tensor(data, "main_grad13"),
                                 .x_dtype = data["rows_dtype"].toScalarType(),
                                 .w_dtype = data["w13_dtype"].toScalarType(),
                                 .needs_dx = needs_dx,
                                 .needs_dw = needs_dw13,
                                 .forms = forms ? &*forms : nullptr});
    out[kW13] = above.dw;
    if (!needs_dx) return out;
    out[kX] = above.dx.to(data["x_dtype"].toScalarType());
    if (saved[kSlotOf].defined())
      out[kX] = unpermute(out[kX], saved[kSlotOf], saved[kRowOf], data["num_tokens"].toSymInt());
    return out;
  }
};

void check_permutation(const Tensor& x, const ExpertMlpOptions& options) {
  const OptionalTensor &slot_of = options.slot_of, &row_of = options.row_of;
  const int64_t top_k = options.top_k;
  TORCH_CHECK_VALUE(slot_of.has_value() == row_of.has_value(), kOp,
                    ": give slot_of and row_of together, or neither");
  TORCH_CHECK_VALUE(top_k == 1 || (slot_of && top_k > 1), kOp,
                    ": top_k must be 1 or more, and 1 without slot_of, got ", top_k);
  if (!slot_of || x.dim() != 2) return;  // check_linear() says so
  const c10::SymInt rows = x.sym_size(0) * top_k;
  for (const Input& index : {Input{kOp, "slot_of", *slot_of}, Input{kOp, "row_of", *row_of}}) {
    const auto dtype = index.tensor.scalar_type();
    TORCH_CHECK_TYPE(dtype == at::kInt, kOp, ": ", index.name, " must be torch.int32, got ",
                     dtype_name(dtype));
    check_shape(index, {rows});
    check_device(index, x);
  }
}

// Checks all arguments, then decides.
MlpPlan checked_plan(const Tensor& x, const Tensor& w13, const Tensor& w2,
                     const ExpertMlpOptions& options, const LinearNeeds& up_needs,
                     const LinearNeeds& down_needs) {
  const Recipe recipe = parse_recipe(options.recipe, kOp);
  const at::ScalarType dtype = options.x_dtype.value_or(at::kFloat);
  TORCH_CHECK_TYPE(dtype == at::kFloat || dtype == at::kBFloat16 || recipe.keeps_dtype, kOp,
                   ": x_dtype must be torch.bfloat16 or torch.float32, got ", dtype_name(dtype));
  const LinearArgs up{.x = x,
                      .w = w13,
                      .offs = options.offs,
                      .quantized_w = options.quantized_w13,
                      .top_k = options.top_k};
  const WeightArgs of_w13{{kOp, "w13", "quantized_w13", "main_grad13"},
                          w13,
                          options.quantized_w13,
                          options.main_grad13};
  const WeightArgs of_w2{
      {kOp, "w2", "quantized_w2", "main_grad2"}, w2, options.quantized_w2, options.main_grad2};
  check_permutation(x, options);
  check_linear(recipe, up, of_w13.names, options.main_grad13);
  const c10::SymInt width = w13.sym_size(1);
  TORCH_CHECK_VALUE((width % 2).sym_eq(0).expect_true(__FILE__, __LINE__), kOp,
                    ": w13 must be [groups, 2 * hidden_dim, dim], got ", w13.sym_sizes());
  check_weight(recipe, of_w2);
  check_device({kOp, "w2", w2}, x);
  check_shape({kOp, "w2", w2}, {w13.sym_size(0), w2.sym_size(1), width / 2});

  PlanArgs up_args = plan_args(recipe, up, up_needs);
  up_args.x = up_args.dx = options.x_dtype.value_or(x.scalar_type());
  up_args.y = recipe.out.value_or(up_args.x);
  // h has the rows of x.
  const LinearArgs down{.x = x, .w = w2, .offs = options.offs, .top_k = options.top_k};
  PlanArgs down_args = plan_args(recipe, down, down_needs);
  down_args.x = down_args.dx = up_args.y;
  down_args.y = recipe.out.value_or(up_args.y);
  MlpPlan plan = make_plan(up_args, down_args);
  take_quantized_w(plan.up, of_w13);
  take_quantized_w(plan.down, of_w2);
  return plan;
}

enum class Autograd : bool { kNo, kYes };

// Without autograd (inference mode) nothing is kept.
template <Autograd kAutograd>
Tensor expert_mlp_kernel(const Tensor& x, const Tensor& w13, const Tensor& w2,
                         const OptionalTensor& offs, std::string_view recipe,
                         OptionalTensors quantized_w13, OptionalTensors quantized_w2,
                         const OptionalTensor& main_grad13, const OptionalTensor& main_grad2,
                         const OptionalTensor& slot_of, const OptionalTensor& row_of, int64_t top_k,
                         std::optional<at::ScalarType> x_dtype) {
  return with_op(kOp, [&] {
    const ExpertMlpOptions options{.offs = offs,
                                   .recipe = recipe,
                                   .quantized_w13 = quantized_w13,
                                   .quantized_w2 = quantized_w2,
                                   .main_grad13 = main_grad13,
                                   .main_grad2 = main_grad2,
                                   .slot_of = slot_of,
                                   .row_of = row_of,
                                   .top_k = top_k,
                                   .x_dtype = x_dtype};
    LinearNeeds up, down;
    if constexpr (kAutograd == Autograd::kYes) {
      up = {.dx = wants_grad(x), .dw = wants_grad(w13), .main_grad = main_grad13};
      down = {.dx = up.dx || up.dw, .dw = wants_grad(w2), .main_grad = main_grad2};
    }
    const Call call{checked_plan(x, w13, w2, options, up, down), options};
    if constexpr (kAutograd == Autograd::kYes)
      return ExpertMlp::apply(x, w13, w2, main_grad13, main_grad2, &call);
    return run_forward(x, w13, w2, call).down.y;
  });
}

}  // namespace

TORCH_LIBRARY_IMPL(moxie, Autograd, m) {
  m.impl("expert_mlp", TORCH_FN(expert_mlp_kernel<Autograd::kYes>));
}
TORCH_LIBRARY_IMPL(moxie, CompositeExplicitAutograd, m) {
  m.impl("expert_mlp", TORCH_FN(expert_mlp_kernel<Autograd::kNo>));
}

}  // namespace moxie::ops
