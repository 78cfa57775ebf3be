// expert_mlp.parallel: expert_mlp with the experts split over the ranks of a process group. Tokens
// go to the ranks of their experts and rows come back (exchange/legs.h); between the two are the
// steps of expert_mlp.cc, on rows that have the order they would have in one process. One node,
// because x and dy travel in FP8.
//
// Between forward and backward it keeps h and the tokens it received, once each, in the form in
// which they came.
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include "moxie/torch/autograd/expert_mlp.h"
#include "moxie/torch/exchange/legs.h"

namespace moxie::ops {
namespace {

using mlp::Call;
using mlp::Keep;
using mlp::Needs;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr const char* kOp = "expert_mlp";

enum Argument : size_t {
  kX,
  kW13,
  kW2,
  kWeights,
  kMainGrad13,
  kMainGrad2,
  kCall,
  kNeeds,
  kArguments
};
enum Saved : size_t {
  kSavedSlotOf,
  kSavedRowOf,
  kSavedTokenOf,  // of the messages; this and the next two are those of Places
  kSavedRowOfArrival,
  kSavedOffs,
  kSavedRowToken,  // of each row of the experts, the token that was received
  kSavedWeights,   // and its weight
  kSavedX,
  kSavedXScale,
  kSavedH,
  kSavedHScale,
  kSavedW13,
  kSavedW13Scale,
  kSavedW2,
  kSavedW2Scale,
  kSavedCount
};

// h in FP8, as expert_mlp.cc keeps it.
constexpr Block kHBlock{1, 128};

enum class Wire : int64_t { kUnquantized, kFp8 };

struct ParallelArgs {
  const Tensor &x, &w13, &w2;
  const Tensor &weights, &offs, &slot_of, &row_of;
  std::string group;
  ExpertMlpParallelOptions options;
};

// Where a call stands once ranks agree.
struct ParallelCall {
  const ParallelArgs& args;
  Group group;
  Wire wire;
  MlpPlan plan;
  Keep keep;
  Places places;
  at::ScalarType rows_dtype;
};

// ---- operands --------------------------------------------------------------------------------

Tensor select_rows(const Tensor& matrix, const Tensor& rows) {
  return dense(matrix).view(at::kByte).index_select(0, rows).view(matrix.scalar_type());
}

// The rows of the experts, of the tokens that were received.
Quantized rows_of(const Quantized& tokens, const Tensor& row_token) {
  Quantized rows{select_rows(tokens.data, row_token), {}};
  if (tokens.scale) rows.scale = select_rows(*tokens.scale, row_token);
  return rows;
}

// Tokens as they travel.
Quantized for_wire(const Plan& plan, Wire wire, Role role, const Tensor& tokens) {
  if (wire == Wire::kUnquantized) return {tokens, {}};
  QuantizeSpec spec = tokens_spec(plan, role, Need::kRowwise);
  spec.layout = ScaleLayout::kPlain;
  const auto made = packed::quantize(tokens, {}, pack(spec));
  return {made[0], made[1]};
}

// The layout in which a pass takes scales that came plain: Hopper puts them in order itself.
ScaleLayout layout_of_received(const Plan& plan) {
  return plan.layout == ScaleLayout::kSwizzled ? ScaleLayout::kSwizzled : ScaleLayout::kPlain;
}

Quantized rowwise_of_received(const Plan& plan, const Quantized& rows, const OptionalTensor& offs) {
  if (layout_of_received(plan) == ScaleLayout::kPlain) return rows;
  const TokenScaleSpec spec{.block = plan.recipe.activations, .layout = ScaleLayout::kSwizzled};
  return {rows.data, packed::token_scale(*rows.scale, offs, rows.data.sym_size(0),
                                         rows.data.sym_size(1), pack(spec))};
}

Quantized colwise_of_received(const Plan& plan, Role role, const Quantized& rows,
                              const OptionalTensor& offs) {
  const Recipe& recipe = plan.recipe;
  const RequantizeSpec spec{.block = recipe.activations,
                            .from_layout = ScaleLayout::kPlain,
                            .colwise = role == Role::kX ? recipe.wgrad_x : recipe.wgrad_dy,
                            .rule = recipe.rule,
                            .layout = plan.layout};
  const auto made = packed::requantize(rows.data, *rows.scale, offs, pack(spec));
  return {made[0], made[1]};
}

QuantizedForms forms_of(const FormsWanted& wanted, const Quantized& rows) {
  if (!rows.scale) return quantize_tokens(wanted, rows.data);
  QuantizedForms forms;
  if (wanted.need != Need::kColwise)
    forms.rowwise = rowwise_of_received(wanted.plan, rows, wanted.offs);
  if (wanted.need != Need::kRowwise)
    forms.colwise = colwise_of_received(wanted.plan, wanted.role, rows, wanted.offs);
  return forms;
}

// Row r of the experts has the weight r.
RowActivation by_row(const Tensor& weights) {
  return {Activation::kSwiglu, weights.unsqueeze(1),
          at::arange(weights.size(0), weights.options().dtype(at::kInt))};
}

// ---- forward ---------------------------------------------------------------------------------

struct ParallelSteps {
  LinearStep up, down;
  Dispatched received;
  Tensor y;
};

ParallelSteps run_parallel(const ParallelCall& call) {
  const ParallelArgs& args = call.args;
  const auto& [up, down] = call.plan;
  const OptionalTensor offs = call.places.offs;
  const Tensor tokens = args.x.to(call.rows_dtype);
  ParallelSteps steps;
  {
    const Quantized sent = for_wire(up, call.wire, Role::kX, tokens);
    steps.received =
        dispatch_tokens({call.group, call.places, sent, "x"}, Weights{args.weights, args.slot_of});
  }
  {
    const Quantized rows = rows_of(steps.received.tokens, steps.received.token_of);
    const QuantizedForms forms = forms_of({up, offs, Role::kX, Need::kRowwise}, rows);
    steps.up = linear_forward(up, {.x = tokens,
                                   .w = args.w13,
                                   .offs = offs,
                                   .quantized_w = args.options.quantized_w13,
                                   .forms = &forms});
  }
  const Tensor& h = steps.up.y;
  {
    const QuantizedForms forms = quantize_swiglu({down, offs, Role::kX, Need::kRowwise}, h, {});
    steps.down = linear_forward(down, {.x = h,
                                       .w = args.w2,
                                       .offs = offs,
                                       .quantized_w = args.options.quantized_w2,
                                       .forms = &forms});
  }
  const Tensor rows = combine_rows({call.group, call.places, steps.down.y, Tensor(), "y"}).rows;
  steps.down.y.reset();
  steps.y = unpermute(rows, args.slot_of, args.row_of, args.x.sym_size(0), args.weights);
  return steps;
}

variable_list saved_of(const ParallelSteps& steps, const ParallelCall& call, const Needs& needs) {
  variable_list saved(kSavedCount);
  saved[kSavedSlotOf] = call.args.slot_of;
  saved[kSavedRowOf] = call.args.row_of;
  saved[kSavedTokenOf] = call.places.token_of;
  saved[kSavedRowOfArrival] = call.places.row_of_arrival;
  saved[kSavedOffs] = call.places.offs;
  saved[kSavedRowToken] = steps.received.token_of;
  saved[kSavedWeights] = steps.received.weights;
  const auto keep = [&](const Quantized& part, size_t at) {
    saved[at] = part.data;
    saved[at + 1] = part.scale.value_or(Tensor());
  };
  if (needs.w13) keep(steps.received.tokens, kSavedX);
  const Tensor& h = steps.up.y;
  if (call.keep == Keep::kH) {
    saved[kSavedH] = h;
  } else {
    const auto made = packed::quantize(h, {}, pack(QuantizeSpec{.rowwise = kHBlock}));
    keep({made[0], made[1]}, kSavedH);
  }
  keep(steps.up.saved.w_t, kSavedW13);
  keep(steps.down.saved.w_t, kSavedW2);
  return saved;
}

// ---- the node --------------------------------------------------------------------------------

template <class Data>
void save_places(Data& data, const Places& places) {
  data["out_tokens"] = places.out.tokens;
  data["out_pairs"] = places.out.pairs;
  data["in_tokens"] = places.in.tokens;
  data["in_pairs"] = places.in.pairs;
}

Places saved_places(const variable_list& saved, ska::flat_hash_map<std::string, at::IValue>& data) {
  Places places;
  places.out = {data["out_tokens"].toIntVector(), data["out_pairs"].toIntVector()};
  places.in = {data["in_tokens"].toIntVector(), data["in_pairs"].toIntVector()};
  places.token_of = saved[kSavedTokenOf];
  places.row_of_arrival = saved[kSavedRowOfArrival];
  places.offs = saved[kSavedOffs];
  return places;
}

struct ExpertMlpParallel : torch::autograd::Function<ExpertMlpParallel> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& w13, const Tensor& w2,
                        const Tensor& /*weights*/, const OptionalTensor& main_grad13,
                        const OptionalTensor& main_grad2, const ParallelCall* call,
                        const Needs* needs) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const ParallelSteps steps = run_parallel(*call);
    auto& data = ctx->saved_data;
    if (needs->any()) ctx->save_for_backward(saved_of(steps, *call, *needs));
    if (main_grad13) data["main_grad13"] = *main_grad13;
    if (main_grad2) data["main_grad2"] = *main_grad2;
    save_places(data, call->places);
    data["group"] = call->group.name();
    data["wire"] = static_cast<int64_t>(call->wire);
    data["plan13"] = pack(call->plan.up);
    data["plan2"] = pack(call->plan.down);
    data["sends_dx"] = needs->x;
    data["sends_dweights"] = needs->weights;
    data["without_hooks"] = saves_without_hooks();
    data["num_tokens"] = x.size(0);
    data["top_k"] = call->args.weights.size(1);
    data["x_dtype"] = x.scalar_type();
    data["rows_dtype"] = call->rows_dtype;
    data["h_dtype"] = steps.up.y.scalar_type();
    data["y_dtype"] = steps.y.scalar_type();
    data["w13_dtype"] = w13.scalar_type();
    data["w2_dtype"] = w2.scalar_type();
    return steps.y;
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    variable_list out(kArguments);
    variable_list saved = saved_for_backward(ctx, kOp);
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    auto& data = ctx->saved_data;
    const auto dtype_of = [&](const char* name) { return data[name].toScalarType(); };
    const Plan plan13 = unpack<Plan>(data["plan13"].toInt(), kOp);
    const Plan plan2 = unpack<Plan>(data["plan2"].toInt(), kOp);
    const Wire wire{data["wire"].toInt()};
    const Group group(data["group"].toStringRef(), kOp);
    const Places places = saved_places(saved, data);
    const OptionalTensor offs = places.offs;
    const Tensor &slot_of = saved[kSavedSlotOf], &row_of = saved[kSavedRowOf];
    const Tensor row_token = saved[kSavedRowToken];
    const RowActivation weights = by_row(saved[kSavedWeights]);
    // x and weights: what any rank needs, all take part in.
    const Needs needs{.x = data["sends_dx"].toBool(),
                      .w13 = ctx->needs_input_grad(kW13),
                      .w2 = ctx->needs_input_grad(kW2),
                      .weights = data["sends_dweights"].toBool()};
    TORCH_CHECK(data.find("began") == data.end(), kOp,
                ": an earlier backward of this graph failed midway and freed what it had used; run "
                "forward again");
    const SavedMemory memory(data["without_hooks"].toBool());
    if (memory.may_release()) data["began"] = true;
    const auto take = [&](size_t at) {
      const OptionalTensor scale = defined(saved[at + 1]);
      return Quantized{std::move(saved[at]), scale};
    };

    Quantized dy_rows;
    {
      // The other ranks wait for this one, whatever its loss reads.
      const Tensor dy = grads[0].to(dtype_of("y_dtype"));
      const Quantized sent = for_wire(plan2, wire, Role::kDy, dy);
      dy_rows = rows_of(dispatch_tokens({group, places, sent, "dy"}, {}).tokens, row_token);
    }
    QuantizedForms dy_forms =
        forms_of({plan2, offs, Role::kDy, need_of_dy(needs.da(), needs.w2)}, dy_rows);
    Tensor da;
    if (needs.da()) {
      Quantized w2_t = take(kSavedW2);
      Plan of_dgrad = plan2;
      if (dy_rows.scale) of_dgrad.layout = layout_of_received(plan2);
      da = linear_dgrad(of_dgrad, dy_forms.rowwise, w2_t, offs, dtype_of("h_dtype"));
      dy_forms.rowwise = {};
      memory.release(w2_t.data);
    }
    dy_rows = {};
    Tensor h = std::move(saved[kSavedH]);
    if (saved[kSavedHScale].defined()) {
      const TokenScaleSpec spec{.block = kHBlock, .layout = ScaleLayout::kPlain};
      Tensor in_fp8 = std::move(h);
      h = packed::dequantize_tokens(in_fp8, saved[kSavedHScale], pack(spec))
              .to(dtype_of("h_dtype"));
      memory.release(in_fp8);
    }
    const c10::SymInt rows = h.sym_size(0);
    QuantizedForms a;
    if (needs.w2) a = quantize_swiglu({plan2, offs, Role::kX, Need::kColwise}, h, weights);
    SwigluGrads of_h;
    if (needs.da())
      of_h = quantize_swiglu_backward(
          {plan13, offs, Role::kDy, need_of_dy(needs.x, needs.w13 || !needs.x)}, da, h, weights,
          Values::kNotWanted);
    da.reset();
    memory.release(h);
    if (needs.w2)
      out[kW2] = linear_wgrad(plan2, {.dy_t = dy_forms.colwise,
                                      .x_t = a.colwise,
                                      .rows = rows,
                                      .offs = offs,
                                      .main_grad = find_tensor(data, "main_grad2"),
                                      .w_dtype = dtype_of("w2_dtype")});
    dy_forms = {}, a = {};
    Tensor dx;
    if (needs.x) {
      Quantized w13_t = take(kSavedW13);
      dx = linear_dgrad(plan13, of_h.dh.rowwise, w13_t, offs, dtype_of("rows_dtype"));
      of_h.dh.rowwise = {};
      memory.release(w13_t.data);
    }
    if (needs.x || needs.weights) {
      const Tensor dweights = needs.weights ? of_h.dweights.flatten() : Tensor();
      const Combined back = combine_rows({group, places, dx, dweights, "dx"});
      if (ctx->needs_input_grad(kX))
        out[kX] = unpermute(back.rows.to(dtype_of("x_dtype")), slot_of, row_of,
                            data["num_tokens"].toInt());
      if (ctx->needs_input_grad(kWeights))
        out[kWeights] = back.of_pairs.index_select(0, row_of).view(
            {data["num_tokens"].toInt(), data["top_k"].toInt()});
    }
    dx.reset();
    if (needs.w13) {
      const Quantized x = rows_of(take(kSavedX), row_token);
      const QuantizedForms x_forms = forms_of({plan13, offs, Role::kX, Need::kColwise}, x);
      out[kW13] = linear_wgrad(plan13, {.dy_t = of_h.dh.colwise,
                                        .x_t = x_forms.colwise,
                                        .rows = rows,
                                        .offs = offs,
                                        .main_grad = find_tensor(data, "main_grad13"),
                                        .w_dtype = dtype_of("w13_dtype")});
    }
    return out;
  }
};

// ---- the call --------------------------------------------------------------------------------

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

ExpertMlpOptions local_options(const ExpertMlpParallelOptions& options, const Tensor& offs) {
  return {.offs = offs,
          .recipe = options.recipe,
          .quantized_w13 = options.quantized_w13,
          .quantized_w2 = options.quantized_w2,
          .main_grad13 = options.main_grad13,
          .main_grad2 = options.main_grad2,
          .keep = options.keep};
}

// What expert_mlp would decide about so many rows of this rank's experts.
std::pair<MlpPlan, Keep> plan_of(const ParallelArgs& args, at::ScalarType rows_dtype,
                                 const Tensor& offs, int64_t rows, const Needs& needs) {
  const Tensor proxy = at::empty({1, args.x.size(1)}, args.x.options().dtype(rows_dtype))
                           .expand({rows, args.x.size(1)});
  const ExpertMlpOptions options = local_options(args.options, offs);
  const Call call = mlp::checked_call({proxy, args.w13, args.w2, options}, needs);
  return {call.plan, call.keep};
}

enum class Autograd : bool { kNo, kYes };

template <Autograd kAutograd>
Tensor call_parallel(const ParallelArgs& args) {
  TORCH_CHECK(!is_traced(args.x) && !args.x.is_meta(), kOp,
              ": sizes of messages depend on the routing, so a call over a group cannot be part of "
              "a graph; leave it outside (torch.compiler.disable)");
  const Group group(args.group, kOp);
  const Recipe recipe = parse_recipe(args.options.recipe, kOp);
  const Wire wire = parse_wire(args.options.wire, recipe);
  const at::ScalarType rows_dtype = args.options.x_dtype.value_or(args.x.scalar_type());
  check_route(args, group.size());
  Needs needs;
  if constexpr (kAutograd == Autograd::kYes)
    needs = {.x = wants_grad(args.x),
             .w13 = wants_grad(args.w13),
             .w2 = wants_grad(args.w2),
             .weights = wants_grad(args.weights)};
  // Before anything is sent: an error must not leave other ranks waiting.
  const int64_t experts = args.w13.size(0);
  plan_of(args, rows_dtype, at::zeros({experts}, args.offs.options()), 0, needs);
  const auto [places, agreed] = [&] {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    return exchange_counts(group, kOp,
                           {ends_in_order(args), dense(args.slot_of), dense(args.row_of),
                            args.weights.size(1), experts},
                           {.autograd = needs.any(),
                            .dx = needs.x,
                            .dweights = needs.weights,
                            .signature = signature_of(args, recipe, wire, rows_dtype)});
  }();
  needs.x = agreed.dx;
  needs.weights = agreed.dweights;
  auto [plan, keep] = plan_of(args, rows_dtype, places.offs, places.in.num_pairs(), needs);
  if (wire == Wire::kFp8) {
    plan.up.quantized_x = recipe.activations;
    plan.up.x_layout = layout_of_received(plan.up);
  }
  const ParallelCall call{args, group, wire, plan, keep, places, rows_dtype};
  if constexpr (kAutograd == Autograd::kYes)
    return ExpertMlpParallel::apply(args.x, args.w13, args.w2, args.weights,
                                    args.options.main_grad13, args.options.main_grad2, &call,
                                    &needs);
  return run_parallel(call).y;
}

template <Autograd kAutograd>
Tensor expert_mlp_parallel_kernel(const Tensor& x, const Tensor& w13, const Tensor& w2,
                                  const Tensor& weights, const Tensor& offs, const Tensor& slot_of,
                                  const Tensor& row_of, std::string_view group,
                                  std::string_view recipe, std::string_view wire,
                                  OptionalTensors quantized_w13, OptionalTensors quantized_w2,
                                  const OptionalTensor& main_grad13,
                                  const OptionalTensor& main_grad2, std::string_view keep,
                                  std::optional<at::ScalarType> x_dtype) {
  const ParallelArgs args{x,
                          w13,
                          w2,
                          weights,
                          offs,
                          slot_of,
                          row_of,
                          std::string(group),
                          {.recipe = recipe,
                           .wire = wire,
                           .quantized_w13 = quantized_w13,
                           .quantized_w2 = quantized_w2,
                           .main_grad13 = main_grad13,
                           .main_grad2 = main_grad2,
                           .keep = keep,
                           .x_dtype = x_dtype}};
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
