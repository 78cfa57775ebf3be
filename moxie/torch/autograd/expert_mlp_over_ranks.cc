#include "moxie/torch/autograd/expert_mlp_over_ranks.h"

#include <ATen/ops/empty.h>

#include "moxie/torch/autograd/node.h"

namespace moxie::ops::mlp {
namespace {

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

// For the same reason, slots that are no permutation's are refused on a CPU before anything is
// sent.
void check_slots(const Input& input) {
  if (!input.tensor.is_cpu()) return;
  const Tensor slots = input.tensor.contiguous();
  const auto* numbers = slots.const_data_ptr<int32_t>();
  for (int64_t i = 0; i < slots.numel(); ++i)
    TORCH_CHECK_VALUE(numbers[i] >= 0 && numbers[i] < slots.numel(), kOp, ": ", input.name,
                      " must be 0 to ", slots.numel() - 1, ", got ", numbers[i], " at ", i);
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
  check_slots({kOp, "slot_of", args.slot_of});
  check_slots({kOp, "row_of", args.row_of});
}

// Rows travel with weights in f32 and are summed in f32.
void check_rows_dtype(at::ScalarType dtype) {
  TORCH_CHECK_TYPE(dtype == at::kFloat || dtype == at::kBFloat16, kOp,
                   ": x over a group must be torch.bfloat16 or torch.float32, got ",
                   dtype_name(dtype));
}

}  // namespace

void check_parallel(const ParallelArgs& args, int64_t world) {
  TORCH_CHECK(!is_traced(args.x) && !args.x.is_meta(), kOp,
              ": a call over a group cannot be part of a graph of torch.compile; leave it outside "
              "(torch.compiler.disable)");
  check_route(args, world);
  check_rows_dtype(args.rows_dtype());
}

Tensor ends_in_order(const ParallelArgs& args) {
  if (args.offs.is_cpu()) return dense(args.offs);
  const int64_t rows = args.weights.numel();
  const Tensor ends = std::get<0>(args.offs.clamp(0, rows).cummax(0));
  ends.narrow(0, ends.size(0) - 1, 1).fill_(rows);
  return ends;
}

int32_t signature_of(const ParallelArgs& args, const Recipe& recipe, Wire wire) {
  uint64_t hash = 14695981039346656037U;  // FNV-1a, over whole numbers
  const auto add = [&](int64_t value) {
    hash = (hash ^ static_cast<uint64_t>(value)) * 1099511628211U;
  };
  add(pack(recipe));
  add(static_cast<int64_t>(wire));
  add(static_cast<int64_t>(args.rows_dtype()));
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

Call checked_call(const ParallelArgs& args, const ExpertMlpOptions& options, int64_t rows,
                  const Needs& needs) {
  const at::ScalarType dtype = args.rows_dtype();
  const int64_t dim = args.x.size(1);
  const Tensor proxy = at::empty({1, dim}, args.x.options().dtype(dtype)).expand({rows, dim});
  return mlp::checked_call({proxy, args.w13, args.w2, options}, needs);
}

Call call_of_received(const ParallelArgs& args, const ExpertMlpOptions& options, int64_t rows,
                      const Needs& needs, Wire wire) {
  Call call = checked_call(args, options, rows, needs);
  if (wire == Wire::kFp8) {
    call.plan.up.quantized_x = call.plan.up.recipe.activations;
    call.plan.up.x_layout = layout_of_received(call.plan.up);
  }
  return call;
}

}  // namespace moxie::ops::mlp
