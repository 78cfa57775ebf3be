// The three passes as ops over quantized operands. Each exists twice: for users, with the recipe as
// text, and for autograd nodes, with a pass of their plan as an integer (overload `quantized`).
#include "moxie/core/layout/parse.h"
#include "moxie/torch/exec.h"
#include "moxie/torch/gemm/multiply.h"
#include "moxie/torch/ops/register.h"

namespace moxie::ops {
namespace {

using OptionalDtype = std::optional<at::ScalarType>;

struct Request {
  const char* op;
  Pass pass;
  Quantized a, b;
  c10::SymInt num_rows;
  OptionalTensor offs;
  OptionalTensor bias = std::nullopt;
  OptionalDtype dtype = std::nullopt;
  // Zeros for autograd nodes, whose quantizers pad with zeros; other callers may pass anything
  // there.
  Padding padding = Padding::kZeros;
};

struct Names {
  const char *a, *a_scale, *b, *b_scale;
};

Names names_of(Pass pass) {
  switch (pass) {
    case Pass::kForward: return {"x", "x_scale", "w", "w_scale"};
    case Pass::kDgrad: return {"dy", "dy_scale", "w_t", "w_scale_t"};
    case Pass::kWgrad: break;
  }
  return {"dy_t", "dy_scale_t", "x_t", "x_scale_t"};
}

c10::SymInt rows_of(const Tensor& tokens) {
  return tokens.dim() == 2 ? tokens.sym_size(0) : c10::SymInt(0);
}

// The shapes that the operands had before quantization, not transposed: tokens [R, C], or weights.
struct Natural {
  SymShape a, b;
  SymShape w;  // [G, N, K]
};

Natural natural_shapes(const Request& request) {
  const SymShape a = sym_shape(request.a.data), b = sym_shape(request.b.data);
  switch (request.pass) {
    case Pass::kForward: return {a, b, b};
    case Pass::kDgrad: {
      const SymShape w = request.b.scale ? SymShape(b[0], b[2], b[1]) : b;
      return {a, w, w};
    }
    case Pass::kWgrad: break;
  }
  const auto tokens = [&](const Quantized& operand, const SymShape& shape) {
    return operand.scale ? SymShape(request.num_rows, shape[0]) : shape;
  };
  const SymShape dy = tokens(request.a, a), x = tokens(request.b, b);
  return {dy, x, {num_groups(request.offs).value_or(1), dy[1], x[1]}};
}

void check_dims(const Request& request) {
  const Names names = names_of(request.pass);
  const auto check = [&](const char* name, const Tensor& tensor, int64_t dims) {
    TORCH_CHECK_VALUE(tensor.dim() == dims, request.op, ": ", name, " must have ", dims,
                      " dims, got ", tensor.dim());
  };
  check(names.a, request.a.data, 2);
  check(names.b, request.b.data, request.pass == Pass::kWgrad ? 2 : 3);
  check_device({request.op, names.b, request.b.data}, request.a.data);
  check_offs(request.op, request.offs, request.a.data);
}

at::ScalarType asked_dtype(const Request& request, const Recipe& recipe) {
  const auto as_a = request.a.scale ? at::kBFloat16 : request.a.data.scalar_type();
  return request.dtype.value_or(recipe.out.value_or(as_a));
}

at::ScalarType result_dtype(const Request& request, const Recipe& recipe) {
  const auto dtype = asked_dtype(request, recipe);
  return recipe.keeps_dtype ? dtype : high_precision(dtype, request.op);
}

// Plans one pass that was called with a recipe as text. add_to: the dtype of the gradient that
// wgrad adds to, if it does.
PassPlan plan_of(const Request& request, const Recipe& recipe,
                 const std::optional<std::string_view>& layout, OptionalDtype add_to = {}) {
  check_dims(request);
  const SymShape w = natural_shapes(request).w;
  const auto result = add_to.value_or(asked_dtype(request, recipe));
  const PlanArgs args{.recipe = recipe,
                      .device = device_behind(request.a.data),
                      .rows = request.num_rows,
                      .groups = w[0],
                      .n = w[1],
                      .k = w[2],
                      .has_offs = request.offs.has_value(),
                      .x = request.a.data.scalar_type(),
                      .y = result,
                      .dx = result,
                      .dw = result,
                      .adds_to_main_grad = add_to.has_value()};
  const bool in_fp8 = request.a.scale && request.b.scale;
  PassPlan plan{.recipe = recipe,
                .kernel = choose_kernel(args, request.pass,
                                        in_fp8 ? OperandDtype::kFp8 : OperandDtype::kOther)};
  const bool swizzles = plan.kernel == Kernel::kSm100;
  plan.tokens = swizzles ? ScaleLayout::kSwizzled : ScaleLayout::kPlain;
  if (layout) {
    plan.tokens = parse_layout(*layout, request.op);
    const bool swizzled = plan.tokens == ScaleLayout::kSwizzled;
    TORCH_CHECK_VALUE(!multiplies_fp8(plan.kernel) || swizzled == swizzles, request.op, ": ",
                      name(plan.kernel), " multiplies operands whose scales are ",
                      swizzles ? "swizzled" : "plain or quads", ", got scale_layout='",
                      name(plan.tokens), "'");
  }
  if (request.pass != Pass::kWgrad && request.b.scale)
    plan.weights =
        layout_by_shape(recipe, plan.kernel, {request.b.data, *request.b.scale, request.pass});
  return plan;
}

// Checks one operand. `natural` is the shape that it had before quantization, not transposed.
struct OperandCheck {
  const char *op, *name, *scale_name;
  const Quantized& operand;
  SymShape natural;
  FormAndBlock as;
  ScaleLayout layout;
};

void check_operand(const OperandCheck& args, const Recipe& recipe, const OptionalTensor& offs) {
  const auto& [op, name, scale_name, operand, natural, as, layout] = args;
  const auto& [data, scale] = operand;
  if (!scale) {
    if (!recipe.keeps_dtype) check_float({op, name, data});
    check_shape({op, name, data}, natural);
    return;
  }
  TORCH_CHECK_VALUE(recipe.quantizes(), op, ": this recipe quantizes nothing, so ", scale_name,
                    " must not be given");
  check_e4m3({op, name, data});
  check_scale({op, scale_name, *scale}, recipe.scaling);
  check_device({op, scale_name, *scale}, data);
  const bool tokens = natural.dims == 2, by_row = recipe.scaling == Scaling::kRow;
  const auto groups = tokens ? num_groups(offs) : std::nullopt;
  const auto expected = by_row ? row_scale_shape(natural, groups, as.form)
                               : operand_shape(natural, groups, as.form, as.block, layout);
  check_shape({op, name, data}, expected.qdata);
  if (tokens && !by_row)
    check_scale_shape({op, scale_name, *scale}, {"scale_layout", layout},
                      {natural, offs, as.form, as.block});
  else
    check_shape({op, scale_name, *scale}, expected.scale);
}

void check_sizes(const Request& request, const Natural& shapes, const Recipe& recipe) {
  const auto& [a, b, w] = shapes;
  const char* op = request.op;
  if (request.pass == Pass::kWgrad) {
    TORCH_CHECK_VALUE(same(a[0], b[0]), op, ": dy and x must have as many rows, got ", a[0],
                      " and ", b[0]);
    TORCH_CHECK_VALUE(same(a[0], request.num_rows), op, ": num_rows must be the ", a[0],
                      " rows of dy and x, got ", request.num_rows);
    return;
  }
  const c10::SymInt groups = num_groups(request.offs).value_or(1);
  TORCH_CHECK_VALUE(same(w[0], groups), op, ": w has ", w[0], " matrices for ", groups, " groups");
  const bool forward = request.pass == Pass::kForward;
  const c10::SymInt contracted = forward ? w[2] : w[1];
  TORCH_CHECK_VALUE(same(a[1], contracted), op, ": ", forward ? "x" : "dy", " must have the ",
                    contracted, " columns that w contracts, got ", a[1]);
  if (!request.bias) return;
  const Input bias{op, "bias", *request.bias};
  if (!recipe.keeps_dtype) check_float(bias);
  check_device(bias, request.a.data);
  check_shape(bias, request.bias->dim() == 2 ? SymShape(w[0], w[1]) : SymShape(w[1]));
}

// Checks that a plan passed as an integer fits these arguments: it may come from anywhere, and a
// kernel would trust it.
void check_plan(const Request& request, const PassPlan& plan) {
  const bool in_fp8 = request.a.scale && request.b.scale;
  const bool by_row = plan.recipe.scaling == Scaling::kRow;
  const bool fits =
      !multiplies_fp8(plan.kernel) || (in_fp8 && by_row == (plan.kernel == Kernel::kSm90Rows));
  TORCH_CHECK_VALUE(fits && (plan.kernel != Kernel::kTorchGrouped || request.offs), request.op,
                    ": these arguments are not those that the plan is for, whose kernel is ",
                    name(plan.kernel));
}

// Checks a request and returns the shape of its result.
SymShape check(const Request& request, const PassPlan& plan) {
  const auto& [op, pass, a, b, num_rows, offs, bias, dtype, padding] = request;
  const Recipe& recipe = plan.recipe;
  const Names names = names_of(pass);
  check_dims(request);
  check_plan(request, plan);
  const Natural shapes = natural_shapes(request);
  const bool wgrad = pass == Pass::kWgrad;
  check_operand({op, names.a, names.a_scale, a, shapes.a, form_of_a(recipe, pass), plan.tokens},
                recipe, offs);
  check_operand({op, names.b, names.b_scale, b, shapes.b, form_of_b(recipe, pass),
                 wgrad ? plan.tokens : plan.weights},
                recipe, offs);
  check_sizes(request, shapes, recipe);
  if (wgrad) return shapes.w;
  return {shapes.a[0], pass == Pass::kForward ? shapes.w[1] : shapes.w[2]};
}

Tensor run(const Request& request, const PassPlan& plan, const SymShape& out,
           const OptionalTensor& add_to) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const auto size = [&](int i) { return out[i].expect_int(); };
  return multiply(
      {.pass = request.pass,
       .plan = plan,
       .a = request.a,
       .b = request.b,
       .offs = request.offs,
       .bias = request.bias,
       .add_to = add_to,
       .out = out.dims == 3 ? Shape(size(0), size(1), size(2)) : Shape(size(0), size(1)),
       .dtype = add_to ? add_to->scalar_type() : result_dtype(request, plan.recipe),
       .num_rows = request.num_rows.expect_int(),
       .padding = request.padding});
}

Tensor call(const Request& request, const PassPlan& plan) {
  const SymShape out = check(request, plan);
  if (request.a.data.is_meta())
    return allocate({{"out", result_dtype(request, plan.recipe), out}}, request.a.data)[0];
  return run(request, plan, out, {});
}

void add(const Request& request, const PassPlan& plan, const Tensor& dw) {
  const SymShape out = check(request, plan);
  const auto dtype = dw.scalar_type();
  TORCH_CHECK_TYPE(dtype == at::kFloat || plan.recipe.keeps_dtype, request.op,
                   ": dw must be torch.float32 to be added to, got ", dtype_name(dtype));
  check_out(request.op, {{"dw", dtype, out}}, {dw},
            {request.a.data, request.a.scale, request.b.data, request.b.scale, request.offs});
  if (dw.is_meta()) return;
  run(request, plan, out, dw);
  mark_written({dw});
}

using Text = std::string_view;
using OptionalText = std::optional<Text>;

Request forward_of(const char* op, const Tensor& x, const OptionalTensor& x_scale, const Tensor& w,
                   const OptionalTensor& w_scale, const OptionalTensor& offs,
                   const OptionalTensor& bias, OptionalDtype dtype) {
  return {op, Pass::kForward, {x, x_scale}, {w, w_scale}, rows_of(x), offs, bias, dtype};
}

Request dgrad_of(const Tensor& dy, const OptionalTensor& dy_scale, const Tensor& w_t,
                 const OptionalTensor& w_scale_t, const OptionalTensor& offs, OptionalDtype dtype) {
  return {"grouped_dgrad",
          Pass::kDgrad,
          {dy, dy_scale},
          {w_t, w_scale_t},
          rows_of(dy),
          offs,
          {},
          dtype};
}

Request wgrad_of(const char* op, const Tensor& dy_t, const OptionalTensor& dy_scale_t,
                 const Tensor& x_t, const OptionalTensor& x_scale_t, const c10::SymInt& num_rows,
                 const OptionalTensor& offs, OptionalDtype dtype) {
  return {op, Pass::kWgrad, {dy_t, dy_scale_t}, {x_t, x_scale_t}, num_rows, offs, {}, dtype};
}

Tensor call_by_recipe(Request request, Text recipe, OptionalText layout) {
  request.padding = Padding::kAnything;
  return with_op(request.op, [&] {
    return call(request, plan_of(request, parse_recipe(recipe, request.op), layout));
  });
}

Tensor call_by_plan(const Request& request, int64_t plan) {
  return with_op(request.op, [&] { return call(request, unpack<PassPlan>(plan, request.op)); });
}

Tensor grouped_fwd(const Tensor& x, const OptionalTensor& x_scale, const Tensor& w,
                   const OptionalTensor& w_scale, const OptionalTensor& offs, Text recipe,
                   const OptionalTensor& bias, OptionalDtype dtype, OptionalText layout) {
  return call_by_recipe(forward_of("grouped_fwd", x, x_scale, w, w_scale, offs, bias, dtype),
                        recipe, layout);
}

Tensor grouped_mm_quantized(const Tensor& x, const OptionalTensor& x_scale, const Tensor& w,
                            const OptionalTensor& w_scale, const OptionalTensor& offs, int64_t plan,
                            const OptionalTensor& bias, OptionalDtype dtype) {
  return call_by_plan(forward_of("grouped_mm", x, x_scale, w, w_scale, offs, bias, dtype), plan);
}

Tensor grouped_dgrad(const Tensor& dy, const OptionalTensor& dy_scale, const Tensor& w_t,
                     const OptionalTensor& w_scale_t, const OptionalTensor& offs, Text recipe,
                     OptionalDtype dtype, OptionalText layout) {
  return call_by_recipe(dgrad_of(dy, dy_scale, w_t, w_scale_t, offs, dtype), recipe, layout);
}

Tensor grouped_dgrad_quantized(const Tensor& dy, const OptionalTensor& dy_scale, const Tensor& w_t,
                               const OptionalTensor& w_scale_t, const OptionalTensor& offs,
                               int64_t plan, OptionalDtype dtype) {
  return call_by_plan(dgrad_of(dy, dy_scale, w_t, w_scale_t, offs, dtype), plan);
}

constexpr const char *kWgradOp = "grouped_wgrad", *kAddOp = "grouped_wgrad_add_";

Tensor grouped_wgrad(const Tensor& dy_t, const OptionalTensor& dy_scale_t, const Tensor& x_t,
                     const OptionalTensor& x_scale_t, c10::SymInt num_rows,
                     const OptionalTensor& offs, Text recipe, OptionalDtype dtype,
                     OptionalText layout) {
  return call_by_recipe(wgrad_of(kWgradOp, dy_t, dy_scale_t, x_t, x_scale_t, num_rows, offs, dtype),
                        recipe, layout);
}

Tensor grouped_wgrad_quantized(const Tensor& dy_t, const OptionalTensor& dy_scale_t,
                               const Tensor& x_t, const OptionalTensor& x_scale_t,
                               c10::SymInt num_rows, const OptionalTensor& offs, int64_t plan,
                               OptionalDtype dtype) {
  return call_by_plan(wgrad_of(kWgradOp, dy_t, dy_scale_t, x_t, x_scale_t, num_rows, offs, dtype),
                      plan);
}

void grouped_wgrad_add_(const Tensor& dw, const Tensor& dy_t, const OptionalTensor& dy_scale_t,
                        const Tensor& x_t, const OptionalTensor& x_scale_t, c10::SymInt num_rows,
                        const OptionalTensor& offs, Text recipe, OptionalText layout) {
  Request request = wgrad_of(kAddOp, dy_t, dy_scale_t, x_t, x_scale_t, num_rows, offs, {});
  request.padding = Padding::kAnything;
  with_op(kAddOp, [&] {
    add(request, plan_of(request, parse_recipe(recipe, kAddOp), layout, dw.scalar_type()), dw);
  });
}

void grouped_wgrad_add_quantized(const Tensor& dw, const Tensor& dy_t,
                                 const OptionalTensor& dy_scale_t, const Tensor& x_t,
                                 const OptionalTensor& x_scale_t, c10::SymInt num_rows,
                                 const OptionalTensor& offs, int64_t plan) {
  const Request request = wgrad_of(kAddOp, dy_t, dy_scale_t, x_t, x_scale_t, num_rows, offs, {});
  with_op(kAddOp, [&] { add(request, unpack<PassPlan>(plan, kAddOp), dw); });
}

void register_ops(torch::Library& m) {
  m.impl("grouped_fwd", TORCH_FN(grouped_fwd));
  m.impl("grouped_dgrad", TORCH_FN(grouped_dgrad));
  m.impl("grouped_wgrad", TORCH_FN(grouped_wgrad));
  m.impl("grouped_wgrad_add_", TORCH_FN(grouped_wgrad_add_));
  m.impl("grouped_mm.quantized", TORCH_FN(grouped_mm_quantized));
  m.impl("grouped_dgrad.quantized", TORCH_FN(grouped_dgrad_quantized));
  m.impl("grouped_wgrad.quantized", TORCH_FN(grouped_wgrad_quantized));
  m.impl("grouped_wgrad_add_.quantized", TORCH_FN(grouped_wgrad_add_quantized));
}

}  // namespace

MOXIE_REGISTER_OPS(register_ops)

}  // namespace moxie::ops
