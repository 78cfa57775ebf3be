// The three passes as ops over quantized operands: check, then the path that choose_path() names.
#include "moxie/core/layout/parse.h"
#include "moxie/torch/exec.h"
#include "moxie/torch/gemm/products.h"
#include "moxie/torch/ops/register.h"

namespace moxie::ops {
namespace {

struct Request {
  const char* op;
  Pass pass;
  const Tensor& a;
  const OptionalTensor& a_scale;
  const Tensor& b;
  const OptionalTensor& b_scale;
  c10::SymInt num_rows;
  const OptionalTensor& offs;
  const OptionalTensor& bias;
  std::string_view recipe;
  std::optional<at::ScalarType> dtype;
  std::optional<std::string_view> scale_layout;
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

// The tensors that the operands are forms of: tokens [R, C] twice, or tokens and weights [G, N, K].
struct Natural {
  SymShape a, b;
};

Natural natural_shapes(const Request& request, bool a_quantized, bool b_quantized) {
  const SymShape a = sym_shape(request.a), b = sym_shape(request.b);
  switch (request.pass) {
    case Pass::kForward: return {a, b};
    case Pass::kDgrad: return {a, b_quantized ? SymShape(b[0], b[2], b[1]) : b};
    case Pass::kWgrad: break;
  }
  return {a_quantized ? SymShape(request.num_rows, a[0]) : a,
          b_quantized ? SymShape(request.num_rows, b[0]) : b};
}

// One operand against the shape of the tensor that it is a form of.
struct Operand {
  const char *op, *name, *scale_name;
  const Tensor& data;
  const OptionalTensor& scale;
  SymShape natural;
  OperandForm as;
};

void check_operand(const Operand& operand, const Recipe& recipe, ScaleLayout layout,
                   const OptionalTensor& offs) {
  const auto& [op, name, scale_name, data, scale, natural, as] = operand;
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

struct Checked {
  Recipe recipe;
  Path path;
  ScaleLayout layout;  // of the scales of tokens
  SymShape out;
  at::ScalarType dtype;
};

ScaleLayout checked_layout(const Request& request, Path path) {
  const bool on_blackwell = path == Path::kSm100;
  if (!request.scale_layout) return on_blackwell ? ScaleLayout::kSwizzled : ScaleLayout::kPlain;
  const ScaleLayout layout = parse_layout(*request.scale_layout, request.op);
  const bool swizzled = layout == ScaleLayout::kSwizzled;
  TORCH_CHECK_VALUE(path == Path::kEmulated || swizzled == on_blackwell, request.op, ": ",
                    name(path), " multiplies operands whose scales are ",
                    on_blackwell ? "swizzled" : "plain or quads", ", got scale_layout='",
                    name(layout), "'");
  return layout;
}

void check_dims(const Request& request, const Names& names) {
  const auto check = [&](const char* name, const Tensor& tensor, int64_t dims) {
    TORCH_CHECK_VALUE(tensor.dim() == dims, request.op, ": ", name, " must have ", dims,
                      " dims, got ", tensor.dim());
  };
  check(names.a, request.a, 2);
  check(names.b, request.b, request.pass == Pass::kWgrad ? 2 : 3);
}

void check_bias(const Request& request, const SymShape& w) {
  if (!request.bias) return;
  const Input bias{request.op, "bias", *request.bias};
  check_device(bias, request.a);
  check_shape(bias, request.bias->dim() == 2 ? SymShape(w[0], w[1]) : SymShape(w[1]));
}

Checked check(const Request& request) {
  const auto& [op, pass, a, a_scale, b, b_scale, num_rows, offs, bias, text, dtype, said] = request;
  const Recipe recipe = parse_recipe(text, op);
  const Names names = names_of(pass);
  check_dims(request, names);
  check_device({op, names.b, b}, a);
  check_offs(op, offs, a);
  const auto [a_shape, b_shape] = natural_shapes(request, a_scale.has_value(), b_scale.has_value());
  const bool wgrad = pass == Pass::kWgrad;
  const c10::SymInt groups = num_groups(offs).value_or(1);
  SymShape w = b_shape;
  if (wgrad) w = {groups, a_shape[1], b_shape[1]};
  // Sizes of w are fixed in any model; on a CPU they are not even looked at.
  const c10::Device device = device_behind(a);
  const auto size = [&](int i) {
    return sizes_matter(recipe, device) ? w[i].guard_int(__FILE__, __LINE__) : int64_t{0};
  };
  const Path path = choose_path(recipe, device, size(1), size(2)).path;
  const ScaleLayout layout = checked_layout(request, path);
  const ScaleLayout b_layout =
      wgrad || !b_scale ? layout : layout_of_weights(path, *b_scale, b, form_of_b(recipe, pass));
  check_operand({op, names.a, names.a_scale, a, a_scale, a_shape, form_of_a(recipe, pass)}, recipe,
                layout, offs);
  check_operand({op, names.b, names.b_scale, b, b_scale, b_shape, form_of_b(recipe, pass)}, recipe,
                b_layout, offs);

  const auto same = [](const c10::SymInt& x, const c10::SymInt& y) {
    return x.sym_eq(y).expect_true(__FILE__, __LINE__);
  };
  if (wgrad) {
    TORCH_CHECK_VALUE(same(a_shape[0], b_shape[0]), op, ": dy and x must have as many rows, got ",
                      a_shape[0], " and ", b_shape[0]);
  } else {
    TORCH_CHECK_VALUE(same(w[0], groups), op, ": w has ", w[0], " matrices for ", groups,
                      " groups");
    const bool forward = pass == Pass::kForward;
    TORCH_CHECK_VALUE(same(a_shape[1], forward ? w[2] : w[1]), op, ": ", forward ? "x" : "dy",
                      " must have the ", forward ? w[2] : w[1], " columns that w contracts, got ",
                      a_shape[1]);
    check_bias(request, w);
  }
  SymShape out = w;
  if (!wgrad) out = {a_shape[0], pass == Pass::kForward ? w[1] : w[2]};
  auto result = dtype.value_or(recipe.out.value_or(a_scale ? at::kBFloat16 : a.scalar_type()));
  if (!recipe.keeps_dtype) result = high_precision(result, op);
  return {recipe, path, layout, out, result};
}

Tensor run(const Request& request, const Checked& checked, const OptionalTensor& add_to) {
  PassArgs args{.pass = request.pass,
                .recipe = checked.recipe,
                .a = {request.a, request.a_scale},
                .b = {request.b, request.b_scale},
                .offs = request.offs,
                .bias = request.bias,
                .add_to = add_to,
                .out = {},
                .dtype = checked.dtype,
                .layout = checked.layout,
                .num_rows = request.num_rows.expect_int()};
  const auto size = [&](int i) { return checked.out[i].expect_int(); };
  args.out = checked.out.dims == 3 ? Shape(size(0), size(1), size(2)) : Shape(size(0), size(1));
  const bool in_fp8 = request.a_scale && request.b_scale;
  OptionalTensor out;
  switch (in_fp8 ? checked.path : Path::kEmulated) {
    case Path::kEmulated: break;
    case Path::kSm90: out = multiply_sm90(args); break;
    case Path::kSm90Rows: out = multiply_sm90_rows(args); break;
    case Path::kSm100: out = multiply_sm100(args); break;
  }
  return out ? *out : multiply_emulated(args);
}

Tensor call(const Request& request) {
  return with_op(request.op, [&] {
    const Checked checked = check(request);
    if (request.a.is_meta()) return allocate({{"out", checked.dtype, checked.out}}, request.a)[0];
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    return run(request, checked, {});
  });
}

using Text = std::string_view;
using OptionalText = std::optional<Text>;
using OptionalDtype = std::optional<at::ScalarType>;

Tensor grouped_mm_quantized(const Tensor& x, const OptionalTensor& x_scale, const Tensor& w,
                            const OptionalTensor& w_scale, const OptionalTensor& offs, Text recipe,
                            const OptionalTensor& bias, OptionalDtype dtype,
                            OptionalText scale_layout) {
  return call({"grouped_mm", Pass::kForward, x, x_scale, w, w_scale,
               x.dim() == 2 ? x.sym_size(0) : c10::SymInt(0), offs, bias, recipe, dtype,
               scale_layout});
}

Tensor grouped_dgrad(const Tensor& dy, const OptionalTensor& dy_scale, const Tensor& w_t,
                     const OptionalTensor& w_scale_t, const OptionalTensor& offs, Text recipe,
                     OptionalDtype dtype, OptionalText scale_layout) {
  return call({"grouped_dgrad",
               Pass::kDgrad,
               dy,
               dy_scale,
               w_t,
               w_scale_t,
               dy.dim() == 2 ? dy.sym_size(0) : c10::SymInt(0),
               offs,
               {},
               recipe,
               dtype,
               scale_layout});
}

Tensor grouped_wgrad(const Tensor& dy_t, const OptionalTensor& dy_scale_t, const Tensor& x_t,
                     const OptionalTensor& x_scale_t, c10::SymInt num_rows,
                     const OptionalTensor& offs, Text recipe, OptionalDtype dtype,
                     OptionalText scale_layout) {
  return call({"grouped_wgrad",
               Pass::kWgrad,
               dy_t,
               dy_scale_t,
               x_t,
               x_scale_t,
               num_rows,
               offs,
               {},
               recipe,
               dtype,
               scale_layout});
}

void grouped_wgrad_add_(const Tensor& dw, const Tensor& dy_t, const OptionalTensor& dy_scale_t,
                        const Tensor& x_t, const OptionalTensor& x_scale_t, c10::SymInt num_rows,
                        const OptionalTensor& offs, Text recipe, OptionalText scale_layout) {
  constexpr const char* kOp = "grouped_wgrad_add_";
  const auto dtype = dw.scalar_type();
  const Request request{kOp,      Pass::kWgrad, dy_t, dy_scale_t, x_t,   x_scale_t,
                        num_rows, offs,         {},   recipe,     dtype, scale_layout};
  with_op(kOp, [&] {
    const Checked checked = check(request);
    TORCH_CHECK_TYPE(dtype == at::kFloat || checked.recipe.keeps_dtype, kOp,
                     ": dw must be torch.float32 to be added to, got ", dtype_name(dtype));
    check_out(kOp, {{"dw", dtype, checked.out}}, {dw}, {dy_t, dy_scale_t, x_t, x_scale_t, offs});
    if (dw.is_meta()) return;
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    run(request, checked, dw);
    mark_written({dw});
  });
}

}  // namespace

void register_grouped_gemm(torch::Library& m) {
  m.impl("grouped_mm.quantized", TORCH_FN(grouped_mm_quantized));
  m.impl("grouped_dgrad", TORCH_FN(grouped_dgrad));
  m.impl("grouped_wgrad", TORCH_FN(grouped_wgrad));
  m.impl("grouped_wgrad_add_", TORCH_FN(grouped_wgrad_add_));
}

}  // namespace moxie::ops
