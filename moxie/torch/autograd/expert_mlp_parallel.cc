// expert_mlp.parallel: expert_mlp with the experts split over the ranks of a process group. Here a
// call is checked and ranks agree about it; expert_mlp_group.h is the way of its tokens.
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include "moxie/torch/autograd/expert_mlp_group.h"

namespace moxie::ops {
namespace {

using mlp::Autograd;
using mlp::Call;
using mlp::kOp;
using mlp::Needs;
using mlp::Wire;

struct ParallelArgs {
  const Tensor &x, &w13, &w2;
  const Tensor &weights, &offs, &slot_of, &row_of;  // of this rank's tokens, to all experts
  std::string group;
  std::string_view wire;
  const ExpertMlpOptions& options;  // without the route
};

Wire parse_wire(std::string_view text, const Recipe& recipe) {
  if (text == "unquantized") return Wire::kUnquantized;
  TORCH_CHECK_VALUE(text == "fp8", kOp, ": wire must be 'fp8' or 'unquantized', got '", text, "'");
  TORCH_CHECK_VALUE(
      recipe.scaling == Scaling::kBlock && recipe.quantizes_wgrad() && recipe.activations.rows == 1,
      kOp, ": wire 'fp8' takes recipes that quantize all three passes in blocks, got ",
      to_text(recipe), "; wire 'unquantized' takes every recipe");
  return Wire::kFp8;
}

// A number that is equal on all ranks where their calls fit together.
int32_t signature_of(const ParallelArgs& args, const Recipe& recipe, Wire wire,
                     at::ScalarType rows_dtype) {
  uint64_t hash = 14695981039346656037U;  // FNV-1a, over whole numbers
  const auto add = [&](int64_t value) {
    hash = (hash ^ static_cast<uint64_t>(value)) * 1099511628211U;
  };
  add(pack(recipe));
  add(static_cast<int64_t>(wire));
  add(static_cast<int64_t>(rows_dtype));
  add(static_cast<int64_t>(args.x.scalar_type()));
  for (const int64_t size : args.w13.sizes()) add(size);
  for (const int64_t size : args.w2.sizes()) add(size);
  add(static_cast<int64_t>(args.w13.scalar_type()));
  add(static_cast<int64_t>(args.w2.scalar_type()));
  for (const OptionalTensor* bias : {&args.options.b13, &args.options.b2})
    add(*bias ? static_cast<int64_t>((*bias)->scalar_type()) : -1);
  for (const std::string_view text : {args.options.activation, args.options.w13_layout})
    for (const char letter : text) add(letter);
  return static_cast<int32_t>(hash ^ (hash >> 32));
}

// Sizes of messages follow from offs. On a CPU wrong ends are refused before anything is sent; on a
// GPU ends_in_order() repairs them, because to look at them would be one more wait.
void check_ends(const ParallelArgs& args) {
  if (!args.offs.is_cpu()) return;
  const Tensor offs = args.offs.contiguous();
  const auto* ends = offs.const_data_ptr<int32_t>();
  int64_t before = 0;
  for (int64_t i = 0; i < offs.numel(); before = ends[i++])
    TORCH_CHECK_VALUE(ends[i] >= before, kOp,
                      ": offs must not decrease and start at 0 or above, got ", ends[i], " after ",
                      before, " at expert ", i);
  TORCH_CHECK_VALUE(before == args.weights.numel(), kOp, ": offs must end at the ",
                    args.weights.numel(), " rows of these tokens, got ", before);
}

// Ends that do not decrease, stay within the rows and end with them.
Tensor ends_in_order(const ParallelArgs& args) {
  if (args.offs.is_cpu()) return dense(args.offs);
  const int64_t rows = args.weights.numel();
  const Tensor ends = std::get<0>(args.offs.clamp(0, rows).cummax(0));
  ends.narrow(0, ends.size(0) - 1, 1).fill_(rows);
  return ends;
}

void check_route(const ParallelArgs& args, int64_t world) {
  TORCH_CHECK_VALUE(args.x.dim() == 2, kOp, ": x must be tokens [T, D], got ", args.x.sizes());
  TORCH_CHECK_VALUE(args.w13.dim() == 3, kOp, ": w13 must be [experts, 2 * hidden_dim, dim], got ",
                    args.w13.sizes());
  TORCH_CHECK_VALUE(args.weights.dim() == 2 && args.weights.size(0) == args.x.size(0), kOp,
                    ": weights must be [T, k] with the ", args.x.size(0), " tokens of x, got ",
                    args.weights.sizes());
  TORCH_CHECK_VALUE(args.weights.size(1) > 0, kOp,
                    ": weights must have at least one column, one per expert of a token, got ",
                    args.weights.sizes());
  TORCH_CHECK_TYPE(args.weights.scalar_type() == at::kFloat, kOp,
                   ": weights must be torch.float32, got ", dtype_name(args.weights.scalar_type()));
  const struct {
    Input input;
    int64_t size;
  } all[] = {{{kOp, "offs", args.offs}, world * args.w13.size(0)},
             {{kOp, "slot_of", args.slot_of}, args.weights.numel()},
             {{kOp, "row_of", args.row_of}, args.weights.numel()}};
  for (const auto& [input, size] : all) {
    TORCH_CHECK_TYPE(input.tensor.scalar_type() == at::kInt, kOp, ": ", input.name,
                     " must be torch.int32, got ", dtype_name(input.tensor.scalar_type()));
    check_shape(input, {size});
    check_device(input, args.x);
  }
  check_device({kOp, "weights", args.weights}, args.x);
  check_ends(args);
}

// Rows travel with weights in f32 and are summed in f32.
void check_rows_dtype(at::ScalarType dtype) {
  TORCH_CHECK_TYPE(dtype == at::kFloat || dtype == at::kBFloat16, kOp,
                   ": x over a group must be torch.bfloat16 or torch.float32, got ",
                   dtype_name(dtype));
}

// expert_mlp's checks and plan, for so many rows of this rank's experts. `options` has their offs.
Call checked_call(const ParallelArgs& args, const ExpertMlpOptions& options, int64_t rows,
                  const Needs& needs) {
  const at::ScalarType dtype = options.x_dtype.value_or(args.x.scalar_type());
  const int64_t dim = args.x.size(1);
  const Tensor proxy = at::empty({1, dim}, args.x.options().dtype(dtype)).expand({rows, dim});
  return mlp::checked_call({proxy, args.w13, args.w2, options}, needs);
}

template <Autograd kAutograd>
Tensor call_parallel(const ParallelArgs& args) {
  TORCH_CHECK(!is_traced(args.x) && !args.x.is_meta(), kOp,
              ": sizes of messages depend on the routing, so a call over a group cannot be part of "
              "a graph; leave it outside (torch.compiler.disable)");
  const Group group(args.group, kOp);
  ExpertMlpOptions options = args.options;
  const Recipe recipe = parse_recipe(options.recipe, kOp);
  const Wire wire = parse_wire(args.wire, recipe);
  const at::ScalarType rows_dtype = options.x_dtype.value_or(args.x.scalar_type());
  check_route(args, group.size());
  check_rows_dtype(rows_dtype);
  const mlp::Args of_mlp{args.x, args.w13, args.w2, options};
  Needs needs = mlp::needs_of<kAutograd>(of_mlp, args.weights);
  // Before anything is sent: an error must not leave other ranks waiting.
  const int64_t experts = args.w13.size(0), top_k = args.weights.size(1);
  options.offs = at::zeros({experts}, args.offs.options());
  checked_call(args, options, 0, needs);
  const Tensor offs = ends_in_order(args);
  const Tensor slot_of = dense(args.slot_of), row_of = dense(args.row_of);
  const Agreed agreed = [&] {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    return exchange_counts(group, kOp, {offs, slot_of, row_of, top_k, experts},
                           {.autograd = needs.any(),
                            .dx = needs.x,
                            .dweights = needs.weights,
                            .db2 = needs.b2,
                            .signature = signature_of(args, recipe, wire, rows_dtype)});
  }();
  const auto path = mlp::group_path({group,
                                     wire,
                                     agreed,
                                     {offs, {slot_of, row_of, top_k}, args.weights},
                                     args.x.scalar_type(),
                                     options.b2.has_value()});
  needs = path->all_needs(needs);
  options.offs = agreed.places.offs;
  Call call = checked_call(args, options, agreed.places.in.num_pairs(), needs);
  if (wire == Wire::kFp8) {
    call.plan.up.quantized_x = recipe.activations;
    call.plan.up.x_layout = mlp::layout_of_received(call.plan.up);
  }
  return mlp::run(kAutograd, of_mlp, call, *path, needs);
}

template <Autograd kAutograd>
Tensor expert_mlp_parallel_kernel(
    const Tensor& x, const Tensor& w13, const Tensor& w2, const Tensor& weights, const Tensor& offs,
    const Tensor& slot_of, const Tensor& row_of, std::string_view group, std::string_view recipe,
    std::string_view wire, OptionalTensors quantized_w13, OptionalTensors quantized_w2,
    const OptionalTensor& main_grad13, const OptionalTensor& main_grad2, std::string_view keep,
    std::optional<at::ScalarType> x_dtype, std::string_view activation, const OptionalTensor& b13,
    const OptionalTensor& b2, std::string_view w13_layout) {
  const ExpertMlpOptions options{.recipe = recipe,
                                 .quantized_w13 = quantized_w13,
                                 .quantized_w2 = quantized_w2,
                                 .main_grad13 = main_grad13,
                                 .main_grad2 = main_grad2,
                                 .keep = keep,
                                 .x_dtype = x_dtype,
                                 .activation = activation,
                                 .b13 = b13,
                                 .b2 = b2,
                                 .w13_layout = w13_layout};
  const ParallelArgs args{x,    w13,    w2, weights, offs, slot_of, row_of, std::string(group),
                          wire, options};
  return with_op(kOp, [&] { return call_parallel<kAutograd>(args); });
}

}  // namespace

TORCH_LIBRARY_IMPL(moxie, Autograd, m) {
  m.impl("expert_mlp.parallel", TORCH_FN(expert_mlp_parallel_kernel<Autograd::kYes>));
}
TORCH_LIBRARY_IMPL(moxie, CompositeExplicitAutograd, m) {
  m.impl("expert_mlp.parallel", TORCH_FN(expert_mlp_parallel_kernel<Autograd::kNo>));
}

}  // namespace moxie::ops
