// expert_mlp: w13, SwiGLU and w2 as one node, so that what lies between them can stay in FP8. In
// plain form: the same ops as the chain grouped_mm, swiglu, grouped_mm, and the same bytes.
#include <torch/library.h>

#include "moxie/torch/autograd/linear.h"
#include "moxie/torch/ops.h"

namespace moxie::ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr const char* kOp = "expert_mlp";

enum Argument : size_t { kX, kW13, kW2, kMainGrad13, kMainGrad2, kCall, kArguments };

struct Call {
  Plan plan13, plan2;
  const OptionalTensor& offs;
  OptionalTensors quantized_w13, quantized_w2;
  bool needs_dx, needs_dw13, needs_dw2;

  bool needs_dh() const { return needs_dx || needs_dw13; }
};

struct Steps {
  LinearStep up, down;  // w13 and w2
};

Steps run_forward(const Tensor& x, const Tensor& w13, const Tensor& w2, const Call& call) {
  Steps steps;
  steps.up = linear_forward(
      call.plan13, {x, w13, call.offs, {}, call.quantized_w13, {}, call.needs_dx, call.needs_dw13});
  const Tensor& h = steps.up.y;
  LinearArgs down{h, w2, call.offs, {}, call.quantized_w2, {}, call.needs_dh(), call.needs_dw2};
  if (const Need need = need_of_x(call.plan2, down); fuses(call.plan2, h, need)) {
    const Forms a = quantize_swiglu(call.plan2, h, call.offs, need);
    down.forms = &a;
    steps.down = linear_forward(call.plan2, down);
  } else {
    const Tensor a = swiglu(h);
    steps.down = linear_forward(
        call.plan2, {a, w2, call.offs, {}, call.quantized_w2, {}, down.needs_dx, down.needs_dw});
  }
  return steps;
}

struct ExpertMlp : torch::autograd::Function<ExpertMlp> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& w13, const Tensor& w2,
                        const OptionalTensor& main_grad13, const OptionalTensor& main_grad2,
                        const Call* call) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const Steps steps = run_forward(x, w13, w2, *call);
    variable_list saved = {call->offs.value_or(Tensor()), call->needs_dh() ? steps.up.y : Tensor()};
    pack_saved(saved, steps.up.saved);
    pack_saved(saved, steps.down.saved);
    ctx->save_for_backward(saved);
    auto& data = ctx->saved_data;
    // Not as saved variables: they are written between forward and backward, and hooks may copy
    // those.
    if (main_grad13) data["main_grad13"] = *main_grad13;
    if (main_grad2) data["main_grad2"] = *main_grad2;
    data["recipe"] = call->plan13.text;
    data["path13"] = static_cast<int64_t>(call->plan13.path);
    data["path2"] = static_cast<int64_t>(call->plan2.path);
    data["groups"] = w13.sym_size(0);
    data["x_dtype"] = x.scalar_type();
    data["h_dtype"] = steps.up.y.scalar_type();
    data["w13_dtype"] = w13.scalar_type();
    data["w2_dtype"] = w2.scalar_type();
    return steps.down.y;
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    variable_list out(kArguments);
    const Tensor& dy = grads[0];
    if (!dy.defined()) return out;
    TORCH_CHECK(!c10::GradMode::is_enabled(), kOp, ": a second derivative is not implemented");
    // First: under checkpointing this runs forward again, with autograd.
    const variable_list saved = ctx->get_saved_variables();
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const OptionalTensor offs = defined(saved[0]);
    const Tensor& h = saved[1];
    auto& data = ctx->saved_data;
    const std::string text = data["recipe"].toStringRef();
    const Recipe recipe = parse_recipe(text, kOp);
    const auto plan = [&](const char* path) {
      return Plan{recipe, text, static_cast<Path>(data[path].toInt())};
    };
    const bool needs_dx = ctx->needs_input_grad(kX), needs_dw13 = ctx->needs_input_grad(kW13);
    const LinearSaved up = unpack_saved(saved, 2),
                      down = unpack_saved(saved, 2 + kLinearSavedCount);
    const LinearGrads below =
        linear_backward(plan("path2"), {.dy = dy,
                                        .saved = down,
                                        .offs = offs,
                                        .num_groups = data["groups"].toSymInt(),
                                        .main_grad = find_tensor(data, "main_grad2"),
                                        .x_dtype = data["h_dtype"].toScalarType(),
                                        .w_dtype = data["w2_dtype"].toScalarType(),
                                        .needs_dx = needs_dx || needs_dw13,
                                        .needs_dw = ctx->needs_input_grad(kW2)});
    out[kW2] = below.dw;
    if (!needs_dx && !needs_dw13) return out;
    const Plan plan13 = plan("path13");
    Tensor dh = h;
    std::optional<Forms> forms;
    if (needs_dx && needs_dw13 && fuses(plan13, h, Need::kBoth))
      forms = quantize_swiglu_backward(plan13, below.dx, h, offs);
    else
      dh = swiglu_backward(below.dx, h);
    const LinearGrads above =
        linear_backward(plan13, {.dy = dh,
                                 .saved = up,
                                 .offs = offs,
                                 .num_groups = data["groups"].toSymInt(),
                                 .main_grad = find_tensor(data, "main_grad13"),
                                 .x_dtype = data["x_dtype"].toScalarType(),
                                 .w_dtype = data["w13_dtype"].toScalarType(),
                                 .needs_dx = needs_dx,
                                 .needs_dw = needs_dw13,
                                 .forms = forms ? &*forms : nullptr});
    out[kX] = above.dx;
    out[kW13] = above.dw;
    return out;
  }
};

Call checked_call(const Tensor& x, const Tensor& w13, const Tensor& w2, const OptionalTensor& offs,
                  std::string_view recipe, const OptionalTensors& quantized_w13,
                  const OptionalTensors& quantized_w2, const OptionalTensor& main_grad13,
                  const OptionalTensor& main_grad2) {
  const Plan plan13 = make_plan(recipe, w13, kOp, "w13"), plan2 = make_plan(recipe, w2, kOp, "w2");
  check_linear(plan13, {x, w13, offs, {}, quantized_w13, {}, false, false},
               {kOp, "w13", "quantized_w13", "main_grad13"}, main_grad13);
  const c10::SymInt width = w13.sym_size(1);
  TORCH_CHECK_VALUE((width % 2).sym_eq(0).expect_true(__FILE__, __LINE__), kOp,
                    ": w13 must be [groups, 2 * hidden_dim, dim], got ", w13.sym_sizes());
  check_device({kOp, "w2", w2}, x);
  check_shape({kOp, "w2", w2}, {w13.sym_size(0), w2.sym_size(1), width / 2});
  check_weight(plan2, {{kOp, "w2", "quantized_w2", "main_grad2"}, w2, quantized_w2, main_grad2});
  return {plan13,        plan2,           offs,          quantized_w13, quantized_w2,
          wants_grad(x), wants_grad(w13), wants_grad(w2)};
}

Tensor expert_mlp_autograd(const Tensor& x, const Tensor& w13, const Tensor& w2,
                           const OptionalTensor& offs, std::string_view recipe,
                           OptionalTensors quantized_w13, OptionalTensors quantized_w2,
                           const OptionalTensor& main_grad13, const OptionalTensor& main_grad2) {
  return with_op(kOp, [&] {
    const Call call = checked_call(x, w13, w2, offs, recipe, quantized_w13, quantized_w2,
                                   main_grad13, main_grad2);
    return ExpertMlp::apply(x, w13, w2, main_grad13, main_grad2, &call);
  });
}

Tensor expert_mlp_plain(const Tensor& x, const Tensor& w13, const Tensor& w2,
                        const OptionalTensor& offs, std::string_view recipe,
                        OptionalTensors quantized_w13, OptionalTensors quantized_w2,
                        const OptionalTensor& main_grad13, const OptionalTensor& main_grad2) {
  return with_op(kOp, [&] {
    Call call = checked_call(x, w13, w2, offs, recipe, quantized_w13, quantized_w2, main_grad13,
                             main_grad2);
    call.needs_dx = call.needs_dw13 = call.needs_dw2 = false;
    return run_forward(x, w13, w2, call).down.y;
  });
}

}  // namespace

TORCH_LIBRARY_IMPL(moxie, Autograd, m) { m.impl("expert_mlp", TORCH_FN(expert_mlp_autograd)); }
TORCH_LIBRARY_IMPL(moxie, CompositeExplicitAutograd, m) {
  m.impl("expert_mlp", TORCH_FN(expert_mlp_plain));
}

}  // namespace moxie::ops
