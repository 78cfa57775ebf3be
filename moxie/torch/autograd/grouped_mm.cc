// The autograd node of grouped_mm. It quantizes x and w, multiplies, and saves what backward reads:
// as a rule x in FP8, colwise, and the form of w that dgrad contracts.
#include <ATen/ops/sum.h>
#include <torch/library.h>

#include "moxie/torch/autograd/linear.h"
#include "moxie/torch/ops.h"

namespace moxie::ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr const char* kOp = "grouped_mm";

// Positions of the arguments of apply(); gradients are returned in the same order.
enum Argument : size_t { kX, kW, kBias, kMainGrad, kCall, kArguments };

struct Call {
  Plan plan;
  LinearArgs args;
};

struct GroupedMm : torch::autograd::Function<GroupedMm> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& w,
                        const OptionalTensor& bias, const OptionalTensor& main_grad,
                        const Call* call) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const auto& [plan, args] = *call;
    LinearStep step = linear_forward(plan, args);
    variable_list saved = {args.offs.value_or(Tensor())};
    // main_grad is not a saved variable: it is written between forward and backward, which torch
    // refuses for saved variables, and saved-tensor hooks may copy those.
    if (main_grad) ctx->saved_data["main_grad"] = *main_grad;
    pack_saved(saved, step.saved);
    ctx->save_for_backward(saved);
    ctx->saved_data["plan"] = pack(plan);
    ctx->saved_data["x_dtype"] = x.scalar_type();
    ctx->saved_data["w_dtype"] = w.scalar_type();
    if (bias) {
      ctx->saved_data["bias_dtype"] = bias->scalar_type();
      ctx->saved_data["bias_dims"] = bias->dim();
    }
    return step.y;
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    variable_list out(kArguments);
    const Tensor& dy = grads[0];
    if (!dy.defined()) return out;
    const variable_list saved = saved_for_backward(ctx, kOp);
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const OptionalTensor offs = defined(saved[0]);
    auto& data = ctx->saved_data;
    const Plan plan = unpack<Plan>(data["plan"].toInt(), kOp);
    const LinearSaved operands = unpack_saved(saved, 1);
    // Computes only gradients that were already needed in forward: the operands of the others were
    // not saved.
    const LinearGrads result = linear_backward(plan, {.dy = dy,
                                                      .saved = operands,
                                                      .offs = offs,
                                                      .main_grad = find_tensor(data, "main_grad"),
                                                      .x_dtype = data["x_dtype"].toScalarType(),
                                                      .w_dtype = data["w_dtype"].toScalarType(),
                                                      .needs_dx = ctx->needs_input_grad(kX),
                                                      .needs_dw = ctx->needs_input_grad(kW)});
    out[kX] = result.dx;
    out[kW] = result.dw;
    if (data.find("bias_dtype") != data.end() && ctx->needs_input_grad(kBias)) {
      Tensor sums = sum_groups(dy, offs);
      if (data["bias_dims"].toInt() == 1) sums = sums.sum(0);
      out[kBias] = sums.to(data["bias_dtype"].toScalarType());
    }
    return out;
  }
};

enum class Autograd : bool { kNo, kYes };

// kNo (inference mode) records no autograd node and saves nothing.
template <Autograd kAutograd>
Tensor multiply(std::string_view text, const LinearArgs& args, const OptionalTensor& main_grad) {
  const Recipe recipe = parse_recipe(text, kOp);
  const LinearNames names{kOp};
  check_linear(recipe, args, names, main_grad);
  LinearNeeds needs;
  if constexpr (kAutograd == Autograd::kYes)
    needs = {.dx = wants_grad(args.x), .dw = wants_grad(args.w), .main_grad = main_grad};
  Call call{make_plan(plan_args(recipe, args, needs)), args};
  take_quantized_w(call.plan, {names, args.w, args.quantized_w, main_grad});
  if constexpr (kAutograd == Autograd::kYes)
    return GroupedMm::apply(args.x, args.w, args.bias, main_grad, &call);
  return linear_forward(call.plan, args).y;
}

template <Autograd kAutograd>
Tensor grouped_mm_kernel(const Tensor& x, const Tensor& w, const OptionalTensor& offs,
                         std::string_view recipe, const OptionalTensor& bias,
                         std::optional<at::ScalarType> dtype, OptionalTensors quantized_w,
                         const OptionalTensor& main_grad) {
  return with_op(kOp, [&] {
    return multiply<kAutograd>(recipe, {x, w, offs, bias, quantized_w, dtype}, main_grad);
  });
}

template <Autograd kAutograd>
Tensor grouped_mm_mx_kernel(const Tensor& x, const Tensor& qdata, const Tensor& scale,
                            const Tensor& w, const OptionalTensor& offs, std::string_view block,
                            std::string_view recipe, const OptionalTensor& bias,
                            std::optional<at::ScalarType> dtype, OptionalTensors quantized_w,
                            const OptionalTensor& main_grad) {
  return with_op(kOp, [&] {
    const MxTensor mx{qdata, scale, std::string(block), x};
    mx.check(kOp);
    check_shape({kOp, "x", x}, sym_shape(qdata));
    return multiply<kAutograd>(recipe,
                               {.x = x,
                                .w = w,
                                .offs = offs,
                                .bias = bias,
                                .quantized_w = quantized_w,
                                .dtype = dtype,
                                .mx = &mx},
                               main_grad);
  });
}

}  // namespace

TORCH_LIBRARY_IMPL(moxie, Autograd, m) {
  m.impl("grouped_mm", TORCH_FN(grouped_mm_kernel<Autograd::kYes>));
  m.impl("grouped_mm.mx", TORCH_FN(grouped_mm_mx_kernel<Autograd::kYes>));
}
TORCH_LIBRARY_IMPL(moxie, CompositeExplicitAutograd, m) {
  m.impl("grouped_mm", TORCH_FN(grouped_mm_kernel<Autograd::kNo>));
  m.impl("grouped_mm.mx", TORCH_FN(grouped_mm_mx_kernel<Autograd::kNo>));
}

}  // namespace moxie::ops
