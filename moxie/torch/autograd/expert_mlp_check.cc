#include "moxie/torch/autograd/expert_mlp.h"
#include "moxie/torch/ops/activation.h"
#include "moxie/torch/stats.h"

namespace moxie::ops::mlp {
namespace {

Keep parse_keep(std::string_view text) {
  if (text == "h") return Keep::kH;
  TORCH_CHECK_VALUE(text == "h_fp8", kOp, ": keep must be 'h' or 'h_fp8', got '", text, "'");
  return Keep::kFp8;
}

void check_permutation(const Tensor& x, const ExpertMlpOptions& options) {
  const OptionalTensor &slot_of = options.slot_of, &row_of = options.row_of;
  const int64_t top_k = options.top_k;
  TORCH_CHECK_VALUE(slot_of.has_value() == row_of.has_value(), kOp,
                    ": give slot_of and row_of together, or neither");
  TORCH_CHECK_VALUE(top_k == 1 || (slot_of && top_k > 1), kOp,
                    ": top_k must be 1 or more, and 1 without slot_of, got ", top_k);
  if (!slot_of || x.dim() != 2) return;  // check_linear() reports the error
  const c10::SymInt rows = x.sym_size(0) * top_k;
  for (const Input& index : {Input{kOp, "slot_of", *slot_of}, Input{kOp, "row_of", *row_of}}) {
    const auto dtype = index.tensor.scalar_type();
    TORCH_CHECK_TYPE(dtype == at::kInt, kOp, ": ", index.name, " must be torch.int32, got ",
                     dtype_name(dtype));
    check_shape(index, {rows});
    check_device(index, x);
  }
}

void check_weights(const Tensor& x, const ExpertMlpOptions& options) {
  if (!options.weights) return;
  const Input weights{kOp, "weights", *options.weights};
  TORCH_CHECK_VALUE(options.slot_of, kOp,
                    ": weights need slot_of and row_of: y is then the sum of ",
                    "each token's rows");
  const auto dtype = x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  TORCH_CHECK_TYPE(weights.tensor.scalar_type() == dtype, kOp, ": weights must be ",
                   dtype_name(dtype), ", got ", dtype_name(weights.tensor.scalar_type()));
  check_shape(weights, {x.sym_size(0), options.top_k});
  check_device(weights, x);
}

W13Layout parse_layout(std::string_view text) {
  if (text == "concatenated") return W13Layout::kConcatenated;
  TORCH_CHECK_VALUE(text == "interleaved", kOp,
                    ": w13_layout must be 'concatenated' or 'interleaved', got '", text, "'");
  return W13Layout::kInterleaved;
}

void check_bias(const Recipe& recipe, const char* argument, const OptionalTensor& bias,
                const SymShape& shape, const Tensor& x) {
  if (!bias) return;
  const Input input{kOp, argument, *bias};
  if (!recipe.keeps_dtype) check_float(input);
  check_shape(input, shape);
  check_device(input, x);
}

}  // namespace

void check_stats(const Tensor& stats, const Tensor& x) {
  const Input input{kOp, "stats", stats};
  TORCH_CHECK_TYPE(stats.scalar_type() == at::kDouble, kOp, ": stats must be torch.float64, got ",
                   dtype_name(stats.scalar_type()));
  check_shape(input, {2, kNumStatsParts, kNumStats});
  check_device(input, x);
}

Call checked_call(const Args& args, const Needs& needs) {
  const auto& [x, w13, w2, options] = args;
  const Recipe recipe = parse_recipe(options.recipe, kOp);
  const Keep keep = parse_keep(options.keep);
  const Activation activation = parse_activation(kOp, options.activation);
  const W13Layout layout = parse_layout(options.w13_layout);
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
  check_weights(x, options);
  const c10::SymInt width = w13.sym_size(1);
  TORCH_CHECK_VALUE((width % 2).sym_eq(0).expect_true(__FILE__, __LINE__), kOp,
                    ": w13 must be [groups, 2 * hidden_dim, dim], got ", w13.sym_sizes());
  check_weight(recipe, of_w2);
  check_device({kOp, "w2", w2}, x);
  check_shape({kOp, "w2", w2}, {w13.sym_size(0), w2.sym_size(1), width / 2});
  check_bias(recipe, "b13", options.b13, {w13.sym_size(0), width}, x);
  check_bias(recipe, "b2", options.b2, {w2.sym_size(0), w2.sym_size(1)}, x);

  PlanArgs up_args =
      plan_args(recipe, up, {.dx = needs.x, .dw = needs.w13, .main_grad = options.main_grad13});
  up_args.x = up_args.dx = options.x_dtype.value_or(x.scalar_type());
  up_args.y = recipe.out.value_or(up_args.x);
  if (layout == W13Layout::kInterleaved) up_args.adds_to_main_grad = false;
  // h has as many rows as x, so x gives the number of rows here.
  const LinearArgs down{.x = x,
                        .w = w2,
                        .offs = options.offs,
                        .quantized_w = options.quantized_w2,
                        .top_k = options.top_k};
  PlanArgs down_args =
      plan_args(recipe, down, {.dx = needs.da(), .dw = needs.w2, .main_grad = options.main_grad2});
  down_args.x = down_args.dx = up_args.y;
  down_args.y = recipe.out.value_or(up_args.y);
  TORCH_CHECK_TYPE(keep == Keep::kH || up_args.y != at::kDouble, kOp,
                   ": keep='h_fp8' takes bf16 and f32, got torch.float64");
  MlpPlan plan = make_plan(up_args, down_args);
  take_quantized_w(plan.up, of_w13);
  take_quantized_w(plan.down, of_w2);
  plan.up.kept_x = plan.down.kept_x = KeptX::kNothing;  // backward makes wgrad's operands from x, h
  return {plan, keep, activation, layout, options};
}

}  // namespace moxie::ops::mlp
