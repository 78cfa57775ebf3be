// expert_mlp: w13, SwiGLU and w2 as one node, so that what lies between them can stay in FP8, and
// so can the rows of tokens that are yet to be permuted; with routing weights also the weighted sum
// of each token's rows. Between forward and backward it keeps x, which is there anyway, and h: the
// operands of wgrad are made again from them, and the gradient of a routing weight is <da, a>,
// which needs no y. Backward gives back what it has used as it goes.
#include "moxie/torch/autograd/expert_mlp.h"

#include <torch/library.h>

namespace moxie::ops {
namespace {

using mlp::Call;
using mlp::Keep;
using mlp::kOp;
using mlp::Needs;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Positions of the arguments of apply(), which the gradients follow.
enum Argument : size_t {
  kX,
  kW13,
  kW2,
  kWeights,
  kB13,
  kB2,
  kMainGrad13,
  kMainGrad2,
  kCall,
  kNeeds,
  kArguments
};
enum Saved : size_t {
  kSavedOffs,
  kSavedX,
  kSavedH,
  kSavedHScale,
  kSavedSlotOf,
  kSavedRowOf,
  kSavedWeights,
  kSavedB2,
  kSavedW13,
  kSavedW13Scale,
  kSavedW2,
  kSavedW2Scale,
  kSavedCount
};

// h in FP8: blocks along a row, whatever those of the recipe.
constexpr Block kHBlock{1, 128};
constexpr QuantizeSpec kHSpec{.rowwise = kHBlock};
constexpr TokenScaleSpec kHScaleSpec{.block = kHBlock, .layout = ScaleLayout::kPlain};

struct Steps {
  LinearStep up, down;  // w13 and w2
  Tensor y;             // rows, or with weights tokens
};

Steps run_forward(const Tensor& x, const Tensor& w13, const Tensor& w2, const Call& call) {
  const ExpertMlpOptions& options = call.options;
  const auto& [up, down] = call.plan;
  const Tensor tokens = x.to(call.rows_dtype(x));
  // What is quantized already is in order.
  const bool interleaved = call.layout == W13Layout::kInterleaved;
  const Tensor rows13 =
      interleaved && (!options.quantized_w13 || call.stats) ? concatenated(w13) : w13;
  const OptionalTensor b13 =
      interleaved && options.b13 ? OptionalTensor(concatenated(*options.b13)) : options.b13;
  Steps steps;
  {
    const QuantizedForms forms =
        quantize_permuted({up, options.offs, Role::kX, Need::kRowwise}, tokens, call.permutation());
    steps.up = linear_forward(up, {.x = tokens,
                                   .w = rows13,
                                   .offs = options.offs,
                                   .bias = b13,
                                   .quantized_w = options.quantized_w13,
                                   .forms = &forms});
  }
  const Tensor& h = steps.up.y;
  {
    const QuantizedForms forms =
        quantize_swiglu({down, options.offs, Role::kX, Need::kRowwise}, h, {call.activation});
    steps.down = linear_forward(down, {.x = h,
                                       .w = w2,
                                       .offs = options.offs,
                                       .bias = options.b2,
                                       .quantized_w = options.quantized_w2,
                                       .forms = &forms});
  }
  if (call.stats) mlp::add_forward_stats(*call.stats, {tokens, h, rows13, w2}, call);
  steps.y = std::move(steps.down.y);
  if (options.weights)
    steps.y = unpermute(steps.y, *options.slot_of, *options.row_of, x.sym_size(0), options.weights);
  return steps;
}

// What backward reads, in the order of Saved.
variable_list saved_of(const Tensor& x, const Steps& steps, const Call& call, const Needs& needs) {
  const ExpertMlpOptions& options = call.options;
  variable_list saved(kSavedCount);
  saved[kSavedOffs] = options.offs.value_or(Tensor());
  if (needs.w13) saved[kSavedX] = x;
  const Tensor& h = steps.up.y;
  if (call.keep == Keep::kH) {
    saved[kSavedH] = h;
  } else {
    const auto made = packed::quantize(h, {}, pack(kHSpec));
    saved[kSavedH] = made[0];
    saved[kSavedHScale] = made[1];
  }
  if (options.slot_of) {
    saved[kSavedSlotOf] = *options.slot_of;
    saved[kSavedRowOf] = *options.row_of;
  }
  if (options.weights) saved[kSavedWeights] = *options.weights;
  if (options.b2 && needs.weights) saved[kSavedB2] = *options.b2;
  const auto keep = [&](const Quantized& w_t, size_t at) {
    saved[at] = w_t.data;
    saved[at + 1] = w_t.scale.value_or(Tensor());
  };
  keep(steps.up.saved.w_t, kSavedW13);
  keep(steps.down.saved.w_t, kSavedW2);
  return saved;
}

// One tensor of the list, with its scale.
Quantized take(variable_list& saved, size_t at) {
  const OptionalTensor scale = defined(saved[at + 1]);
  return {std::move(saved[at]), scale};
}

Tensor take_h(variable_list& saved, at::ScalarType dtype, const SavedMemory& memory) {
  if (!saved[kSavedHScale].defined()) return std::move(saved[kSavedH]);
  const Tensor h =
      packed::dequantize_tokens(saved[kSavedH], saved[kSavedHScale], pack(kHScaleSpec)).to(dtype);
  memory.release(saved[kSavedH]);
  return h;
}

// dw13 as w13 lies; undefined where it was added to main_grad.
Tensor wgrad13(const Plan& plan, const WgradArgs& args, W13Layout layout) {
  if (layout == W13Layout::kConcatenated) return linear_wgrad(plan, args);
  const OptionalTensor& main_grad = args.main_grad;
  const Tensor dw =
      linear_wgrad(plan, {.dy_t = args.dy_t,
                          .x_t = args.x_t,
                          .rows = args.rows,
                          .offs = args.offs,
                          .main_grad = std::nullopt,
                          .w_dtype = main_grad ? main_grad->scalar_type() : args.w_dtype});
  if (!main_grad) return interleaved(dw);
  halves_of_interleaved(*main_grad).add_(dw.unflatten(1, {2, -1}));
  return {};
}

struct ExpertMlp : torch::autograd::Function<ExpertMlp> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& w13, const Tensor& w2,
                        const OptionalTensor& /*weights*/, const OptionalTensor& b13,
                        const OptionalTensor& b2, const OptionalTensor& main_grad13,
                        const OptionalTensor& main_grad2, const Call* call, const Needs* needs) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const Steps steps = run_forward(x, w13, w2, *call);
    const ExpertMlpOptions& options = call->options;
    auto& data = ctx->saved_data;
    if (needs->any()) ctx->save_for_backward(saved_of(x, steps, *call, *needs));
    // Not as saved variables: they are written between forward and backward, and hooks may copy
    // those.
    if (main_grad13) data["main_grad13"] = *main_grad13;
    if (main_grad2) data["main_grad2"] = *main_grad2;
    if (call->stats) {
      data["stats"] = *call->stats;
      data["recipe"] = std::string(options.recipe);
    }
    data["plan13"] = pack(call->plan.up);
    data["plan2"] = pack(call->plan.down);
    data["top_k"] = options.top_k;
    data["without_hooks"] = saves_without_hooks();
    data["num_tokens"] = x.sym_size(0);
    data["x_dtype"] = x.scalar_type();
    data["rows_dtype"] = call->rows_dtype(x);
    data["h_dtype"] = steps.up.y.scalar_type();
    data["y_dtype"] = steps.y.scalar_type();
    data["w13_dtype"] = w13.scalar_type();
    data["w2_dtype"] = w2.scalar_type();
    if (b13) data["b13_dtype"] = b13->scalar_type();
    if (b2) data["b2_dtype"] = b2->scalar_type();
    data["activation"] = static_cast<int64_t>(call->activation);
    data["w13_layout"] = static_cast<int64_t>(call->layout);
    return steps.y;
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    variable_list out(kArguments);
    if (!grads[0].defined()) return out;
    variable_list saved = saved_for_backward(ctx, kOp);
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    auto& data = ctx->saved_data;
    const auto dtype_of = [&](const char* name) { return data[name].toScalarType(); };
    const Tensor dy = grads[0].to(dtype_of("y_dtype"));
    const Plan plan13 = unpack<Plan>(data["plan13"].toInt(), kOp);
    const Plan plan2 = unpack<Plan>(data["plan2"].toInt(), kOp);
    const OptionalTensor offs = defined(saved[kSavedOffs]);
    const Permutation permutation{defined(saved[kSavedSlotOf]), defined(saved[kSavedRowOf]),
                                  data["top_k"].toInt()};
    const OptionalTensor weights = defined(saved[kSavedWeights]);
    // With weights, dy is of tokens.
    const Permutation of_dy = weights ? permutation : Permutation{};
    const RowActivation glu{static_cast<Activation>(data["activation"].toInt()), weights,
                            weights ? permutation.slot_of : std::nullopt};
    const auto layout = static_cast<W13Layout>(data["w13_layout"].toInt());
    const auto has = [&](const char* name) { return data.find(name) != data.end(); };
    // torch counts the tensors that were given, in the order of Argument.
    size_t next = kWeights;
    const auto needs_optional = [&](bool given) { return given && ctx->needs_input_grad(next++); };
    const Needs needs{.x = ctx->needs_input_grad(kX),
                      .w13 = ctx->needs_input_grad(kW13),
                      .w2 = ctx->needs_input_grad(kW2),
                      .weights = needs_optional(weights.has_value()),
                      .b13 = needs_optional(has("b13_dtype")),
                      .b2 = needs_optional(has("b2_dtype"))};
    if (!needs.any()) return out;
    // An error below, such as no memory left, may come after tensors of the graph were freed.
    TORCH_CHECK(data.find("began") == data.end(), kOp,
                ": an earlier backward of this graph failed midway and freed what it had used; run "
                "forward again");
    const SavedMemory memory(data["without_hooks"].toBool());
    if (memory.may_release()) data["began"] = true;

    QuantizedForms dy_forms =
        quantize_permuted({plan2, offs, Role::kDy, need_of_dy(needs.da(), needs.w2)}, dy, of_dy);
    Tensor da;
    if (needs.da()) {
      Quantized w2_t = take(saved, kSavedW2);
      da = linear_dgrad(plan2, dy_forms.rowwise, w2_t, offs, dtype_of("h_dtype"));
      dy_forms.rowwise = {};
      memory.release(w2_t.data);
    }
    Tensor h = take_h(saved, dtype_of("h_dtype"), memory);
    const c10::SymInt rows = h.sym_size(0);
    if (const OptionalTensor stats = find_tensor(data, "stats"))
      mlp::add_backward_stats(*stats, {dy, da, h, of_dy, glu, offs, data["recipe"].toStringRef()});
    QuantizedForms a;
    if (needs.w2) a = quantize_swiglu({plan2, offs, Role::kX, Need::kColwise}, h, glu);
    SwigluGrads of_h;
    if (needs.da())
      of_h = quantize_swiglu_backward(
          {plan13, offs, Role::kDy, need_of_dy(needs.x, needs.w13 || !needs.x)}, da, h, glu,
          needs.b13 ? Values::kWanted : Values::kNotWanted);
    da.reset();
    memory.release(h);
    if (needs.b13) {
      const Tensor sums = sum_groups(of_h.values, offs).to(dtype_of("b13_dtype"));
      out[kB13] = layout == W13Layout::kInterleaved ? interleaved(sums) : sums;
      of_h.values.reset();
    }
    const mlp::BiasArgs of_b2{dy, offs, of_dy, weights};
    if (needs.b2) out[kB2] = mlp::b2_gradient(of_b2).to(dtype_of("b2_dtype"));
    if (needs.weights) {
      out[kWeights] = of_h.dweights;
      if (has("b2_dtype"))
        out[kWeights] = of_h.dweights.add(mlp::b2_weight_gradient(of_b2, saved[kSavedB2]));
    }
    if (needs.w2)
      out[kW2] = linear_wgrad(plan2, {.dy_t = dy_forms.colwise,
                                      .x_t = a.colwise,
                                      .rows = rows,
                                      .offs = offs,
                                      .main_grad = find_tensor(data, "main_grad2"),
                                      .w_dtype = dtype_of("w2_dtype")});
    dy_forms = {}, a = {};
    if (needs.x) {
      Quantized w13_t = take(saved, kSavedW13);
      Tensor dx = linear_dgrad(plan13, of_h.dh.rowwise, w13_t, offs, dtype_of("rows_dtype"));
      of_h.dh.rowwise = {};
      memory.release(w13_t.data);
      dx = dx.to(dtype_of("x_dtype"));
      if (permutation.slot_of)
        dx =
            unpermute(dx, *permutation.slot_of, *permutation.row_of, data["num_tokens"].toSymInt());
      out[kX] = dx;
    }
    if (needs.w13) {
      const Tensor x = saved[kSavedX].to(dtype_of("rows_dtype"));
      const QuantizedForms x_forms =
          quantize_permuted({plan13, offs, Role::kX, Need::kColwise}, x, permutation);
      out[kW13] = wgrad13(plan13,
                          {.dy_t = of_h.dh.colwise,
                           .x_t = x_forms.colwise,
                           .rows = rows,
                           .offs = offs,
                           .main_grad = find_tensor(data, "main_grad13"),
                           .w_dtype = dtype_of("w13_dtype")},
                          layout);
    }
    return out;
  }
};

enum class Autograd : bool { kNo, kYes };

// Without autograd (inference mode) nothing is kept.
template <Autograd kAutograd>
Tensor call_expert_mlp(const mlp::Args& args, const OptionalTensor& stats) {
  return with_op(kOp, [&] {
    const auto& [x, w13, w2, options] = args;
    Needs needs;
    if constexpr (kAutograd == Autograd::kYes)
      needs = {.x = wants_grad(x),
               .w13 = wants_grad(w13),
               .w2 = wants_grad(w2),
               .weights = options.weights && wants_grad(*options.weights),
               .b13 = options.b13 && wants_grad(*options.b13),
               .b2 = options.b2 && wants_grad(*options.b2)};
    Call call = mlp::checked_call(args, needs);
    if (stats) {
      mlp::check_stats(*stats, x);
      call.stats = stats;
    }
    if constexpr (kAutograd == Autograd::kYes)
      return ExpertMlp::apply(x, w13, w2, options.weights, options.b13, options.b2,
                              options.main_grad13, options.main_grad2, &call, &needs);
    return run_forward(x, w13, w2, call).y;
  });
}

template <Autograd kAutograd>
Tensor expert_mlp_kernel(const Tensor& x, const Tensor& w13, const Tensor& w2,
                         const OptionalTensor& offs, std::string_view recipe,
                         OptionalTensors quantized_w13, OptionalTensors quantized_w2,
                         const OptionalTensor& main_grad13, const OptionalTensor& main_grad2,
                         const OptionalTensor& slot_of, const OptionalTensor& row_of, int64_t top_k,
                         const OptionalTensor& weights, std::string_view keep,
                         std::optional<at::ScalarType> x_dtype, std::string_view activation,
                         const OptionalTensor& b13, const OptionalTensor& b2,
                         std::string_view w13_layout) {
  const ExpertMlpOptions options =
      mlp::options_of(offs, recipe, quantized_w13, quantized_w2, main_grad13, main_grad2, slot_of,
                      row_of, top_k, weights, keep, x_dtype, activation, b13, b2, w13_layout);
  return call_expert_mlp<kAutograd>({x, w13, w2, options}, {});
}

template <Autograd kAutograd>
Tensor expert_mlp_stats_kernel(const Tensor& x, const Tensor& w13, const Tensor& w2,
                               const Tensor& stats, const OptionalTensor& offs,
                               std::string_view recipe, OptionalTensors quantized_w13,
                               OptionalTensors quantized_w2, const OptionalTensor& main_grad13,
                               const OptionalTensor& main_grad2, const OptionalTensor& slot_of,
                               const OptionalTensor& row_of, int64_t top_k,
                               const OptionalTensor& weights, std::string_view keep,
                               std::optional<at::ScalarType> x_dtype, std::string_view activation,
                               const OptionalTensor& b13, const OptionalTensor& b2,
                               std::string_view w13_layout) {
  const ExpertMlpOptions options =
      mlp::options_of(offs, recipe, quantized_w13, quantized_w2, main_grad13, main_grad2, slot_of,
                      row_of, top_k, weights, keep, x_dtype, activation, b13, b2, w13_layout);
  return call_expert_mlp<kAutograd>({x, w13, w2, options}, stats);
}

}  // namespace

TORCH_LIBRARY_IMPL(moxie, Autograd, m) {
  m.impl("expert_mlp", TORCH_FN(expert_mlp_kernel<Autograd::kYes>));
  m.impl("expert_mlp.stats", TORCH_FN(expert_mlp_stats_kernel<Autograd::kYes>));
}
TORCH_LIBRARY_IMPL(moxie, CompositeExplicitAutograd, m) {
  m.impl("expert_mlp", TORCH_FN(expert_mlp_kernel<Autograd::kNo>));
  m.impl("expert_mlp.stats", TORCH_FN(expert_mlp_stats_kernel<Autograd::kNo>));
}

}  // namespace moxie::ops
