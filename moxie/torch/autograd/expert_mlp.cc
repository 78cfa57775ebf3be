// expert_mlp: w13, SwiGLU and w2 as one autograd node, so that what lies between them can stay in
// FP8. The node also permutes tokens or exchanges them with other ranks (expert_mlp_path.h), so
// that they can do so in FP8, and with routing weights it sums each token's rows. For backward it
// keeps x and h. The operands of wgrad are made again from them, and the gradient of a routing
// weight is <da, a>, which needs no y. Backward frees each saved tensor after its last use.
#include "moxie/torch/autograd/expert_mlp_path.h"

namespace moxie::ops::mlp {
namespace {

using torch::autograd::AutogradContext;

// Positions of the arguments of apply(); backward returns the gradients in the same order.
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
  kPath,
  kNeeds,
  kArguments
};
enum Saved : size_t {
  kSavedH,
  kSavedHScale,
  kSavedB2,
  kSavedW13,
  kSavedW13Scale,
  kSavedW2,
  kSavedW2Scale,
  kSavedCount  // then what TokenPath::save() appends
};

// With keep='h_fp8', h waits for backward in blocks along a row, whatever the recipe's blocks are.
constexpr Block kHBlock{1, 128};
constexpr QuantizeSpec kHSpec{.rowwise = kHBlock};
constexpr TokenScaleSpec kHScaleSpec{.block = kHBlock, .layout = ScaleLayout::kPlain};

// What backward needs to know of forward besides its plans. The node keeps it as one integer: each
// entry of saved_data is a hash and an insertion.
struct Settings {
  at::ScalarType rows, h, y, w13, w2, b13, b2;  // dtypes; of b13 and b2 only if they are given
  bool has_weights, has_b13, has_b2;
  bool without_hooks;  // what saves_without_hooks() returned
  Activation activation;
  W13Layout layout;

  template <class Self, class F>
  static void fields(Self& self, F&& f) {
    constexpr int kDtypeBits = 6;
    static_assert(static_cast<int>(at::ScalarType::NumOptions) <= 1 << kDtypeBits);
    for (auto* dtype : {&self.rows, &self.h, &self.y, &self.w13, &self.w2, &self.b13, &self.b2})
      f(*dtype, kDtypeBits);
    f(self.has_weights, 1);
    f(self.has_b13, 1);
    f(self.has_b2, 1);
    f(self.without_hooks, 1);
    f(self.activation, 1);
    f(self.layout, 1);
  }
};

struct Steps {
  LinearStep up, down;  // w13 and w2
  Tensor y;             // rows [R, D], or with weights tokens [T, D]
};

Steps run_forward(const Args& args, const Call& call, TokenPath& path) {
  const auto& [x, w13, w2, options] = args;
  const auto& [up, down] = call.plan;
  const Tensor tokens = x.to(call.rows_dtype(x));
  // SwiGLU needs w13's rows concatenated. quantized_w13 is so already, and then w13 is read for
  // stats only.
  const bool interleaved = call.layout == W13Layout::kInterleaved;
  const Tensor rows13 =
      interleaved && (!options.quantized_w13 || call.stats) ? concatenated(w13) : w13;
  const OptionalTensor b13 =
      interleaved && options.b13 ? OptionalTensor(concatenated(*options.b13)) : options.b13;
  Steps steps;
  {
    const QuantizedForms forms = path.x_to_experts(up, tokens);
    steps.up = linear_forward(up, {.x = tokens,
                                   .w = rows13,
                                   .offs = path.offs(),
                                   .bias = b13,
                                   .quantized_w = options.quantized_w13,
                                   .forms = &forms});
  }
  const Tensor& h = steps.up.y;
  {
    const QuantizedForms forms =
        quantize_swiglu({down, path.offs(), Role::kX, Need::kRowwise}, h, {call.activation});
    steps.down = linear_forward(down, {.x = h,
                                       .w = w2,
                                       .offs = path.offs(),
                                       .bias = options.b2,
                                       .quantized_w = options.quantized_w2,
                                       .forms = &forms});
  }
  if (call.stats) add_forward_stats(*call.stats, {tokens, h, rows13, w2}, call);
  steps.y = path.y_from_experts(std::exchange(steps.down.y, Tensor()));
  return steps;
}

// The tensors that backward reads, in the order of Saved.
variable_list saved_of(const Steps& steps, const Args& args, const Call& call, const Needs& needs) {
  variable_list saved(kSavedCount);
  const auto keep = [&](const Quantized& part, size_t at) {
    saved[at] = part.data;
    saved[at + 1] = part.scale.value_or(Tensor());
  };
  const Tensor& h = steps.up.y;
  if (call.keep == Keep::kH) {
    saved[kSavedH] = h;
  } else {
    const auto made = packed::quantize(h, {}, pack(kHSpec));
    keep({made[0], made[1]}, kSavedH);
  }
  if (call.options.b2 && needs.weights) saved[kSavedB2] = *call.options.b2;
  keep(steps.up.saved.w, kSavedW13);
  keep(steps.down.saved.w, kSavedW2);
  // The caller's w13, and not a copy of it whose rows are concatenated.
  if (call.plan.up.kept_w == KeptW::kItself) saved[kSavedW13] = args.w13;
  return saved;
}

// Takes a saved tensor and its scale, which follows it, out of the list.
Quantized take(variable_list& saved, size_t at) {
  const OptionalTensor scale = defined(saved[at + 1]);
  return {std::move(saved[at]), scale};
}

// Takes the saved w13 or w2 out of the list, in the form that dgrad reads. w2 is always
// "concatenated".
Quantized take_w(variable_list& saved, size_t at, const Plan& plan, W13Layout layout,
                 const SavedMemory& memory) {
  Quantized w = take(saved, at);
  if (plan.kept_w != KeptW::kItself) return w;
  const bool interleaved = layout == W13Layout::kInterleaved;
  const Quantized form =
      dgrad_weights(plan, {interleaved ? concatenated(w.data) : w.data, std::nullopt});
  memory.release(w.data);
  return form;
}

Tensor take_h(variable_list& saved, at::ScalarType dtype, const SavedMemory& memory) {
  if (!saved[kSavedHScale].defined()) return std::move(saved[kSavedH]);
  const Tensor h =
      packed::dequantize_tokens(saved[kSavedH], saved[kSavedHScale], pack(kHScaleSpec)).to(dtype);
  memory.release(saved[kSavedH]);
  return h;
}

// dw13 in the layout in which w13 is stored; undefined if it was added to main_grad.
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

std::unique_ptr<TokenPath> restored_path(variable_list& saved, SavedData& data) {
  variable_list of_path(std::make_move_iterator(saved.begin() + kSavedCount),
                        std::make_move_iterator(saved.end()));
  switch (PathKind{data["path"].toInt()}) {
    case PathKind::kLocal: break;
    case PathKind::kGroup: return restored_group_path(std::move(of_path), data);
    case PathKind::kSymmetric: return restored_symmetric_path(std::move(of_path), data);
  }
  return restored_local_path(std::move(of_path), data);
}

struct ExpertMlp : torch::autograd::Function<ExpertMlp> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& w13, const Tensor& w2,
                        const OptionalTensor& weights, const OptionalTensor& b13,
                        const OptionalTensor& b2, const OptionalTensor& main_grad13,
                        const OptionalTensor& main_grad2, const Call* call, TokenPath* path,
                        const Needs* needs) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const ExpertMlpOptions& options = call->options;
    const Steps steps = run_forward({x, w13, w2, options}, *call, *path);
    auto& data = ctx->saved_data;
    if (needs->any()) {
      variable_list saved = saved_of(steps, {x, w13, w2, options}, *call, *needs);
      path->save(*needs, saved, data);
      ctx->save_for_backward(std::move(saved));
    }
    // The main gradients and stats are not saved variables: they are written between forward and
    // backward, which torch refuses for saved variables, and saved-tensor hooks may copy those.
    if (main_grad13) data["main_grad13"] = *main_grad13;
    if (main_grad2) data["main_grad2"] = *main_grad2;
    if (call->stats) {
      data["stats"] = *call->stats;
      data["recipe"] = std::string(options.recipe);
    }
    data["plan13"] = pack(call->plan.up);
    data["plan2"] = pack(call->plan.down);
    data["settings"] = pack(Settings{.rows = call->rows_dtype(x),
                                     .h = steps.up.y.scalar_type(),
                                     .y = steps.y.scalar_type(),
                                     .w13 = w13.scalar_type(),
                                     .w2 = w2.scalar_type(),
                                     .b13 = b13 ? b13->scalar_type() : at::kFloat,
                                     .b2 = b2 ? b2->scalar_type() : at::kFloat,
                                     .has_weights = weights.has_value(),
                                     .has_b13 = b13.has_value(),
                                     .has_b2 = b2.has_value(),
                                     .without_hooks = saves_without_hooks(),
                                     .activation = call->activation,
                                     .layout = call->layout});
    return steps.y;
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    variable_list out(kArguments);
    variable_list saved = saved_for_backward(ctx, kOp);
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    auto& data = ctx->saved_data;
    const auto settings = unpack<Settings>(data["settings"].toInt(), kOp);
    // needs_input_grad() counts only tensors, and of optional ones only those that were given, in
    // the order of Argument.
    size_t next = kWeights;
    const auto needs_optional = [&](bool given) { return given && ctx->needs_input_grad(next++); };
    const Needs own{.x = ctx->needs_input_grad(kX),
                    .w13 = ctx->needs_input_grad(kW13),
                    .w2 = ctx->needs_input_grad(kW2),
                    .weights = needs_optional(settings.has_weights),
                    .b13 = needs_optional(settings.has_b13),
                    .b2 = needs_optional(settings.has_b2)};
    if (!own.any()) return out;
    // Backward frees tensors of the graph as it goes. If it then fails, say for lack of memory, a
    // second call must not read them.
    TORCH_CHECK(data.find("began") == data.end(), kOp,
                ": an earlier backward of this graph failed midway and freed what it had used; run "
                "forward again");
    const SavedMemory memory(settings.without_hooks);
    if (memory.may_release()) data["began"] = true;
    const Plan plan13 = unpack<Plan>(data["plan13"].toInt(), kOp);
    const Plan plan2 = unpack<Plan>(data["plan2"].toInt(), kOp);
    const std::unique_ptr<TokenPath> path = restored_path(saved, data);
    const OptionalTensor& offs = path->offs();
    const RowActivation glu = path->weighted(settings.activation);
    const Needs needs = path->all_needs(own);
    const Tensor dy = grads[0].to(settings.y);

    // The gradients that b2 takes part in are computed where the tokens are, from dy before it is
    // sent.
    const TokenRows of_tokens = path->token_rows();
    const BiasArgs of_b2{dy, of_tokens.offs, of_tokens.permutation, of_tokens.weights};
    const bool adds_b2 = needs.weights && settings.has_b2;  // to the gradient of the weights
    TokenPath::Dy dy_rows =
        path->dy_to_experts(plan2, dy, need_of_dy(needs.da(), needs.w2),
                            {.b2 = adds_b2 ? std::move(saved[kSavedB2]) : Tensor(),
                             .db2 = needs.b2 ? b2_gradient(of_b2) : Tensor()});
    const Tensor all_b2 = std::move(dy_rows.bias.b2);
    if (needs.b2) out[kB2] = dy_rows.bias.db2.to(settings.b2);
    Tensor da;
    if (needs.da()) {
      Quantized w2_t = take_w(saved, kSavedW2, plan2, W13Layout::kConcatenated, memory);
      da = linear_dgrad(dy_rows.dgrad, dy_rows.forms.rowwise, w2_t, offs, settings.h);
      dy_rows.forms.rowwise = {};
      memory.release(w2_t.data);
    }
    Tensor h = take_h(saved, settings.h, memory);
    const c10::SymInt rows = h.sym_size(0);
    if (const OptionalTensor stats = find_tensor(data, "stats"))
      add_backward_stats(
          *stats, {dy, da, h, of_tokens.permutation, glu, offs, data["recipe"].toStringRef()});
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
      const Tensor sums = sum_groups(of_h.values, offs).to(settings.b13);
      out[kB13] = settings.layout == W13Layout::kInterleaved ? interleaved(sums) : sums;
      of_h.values.reset();
    }
    if (needs.w2)
      out[kW2] = linear_wgrad(plan2, {.dy_t = dy_rows.forms.colwise,
                                      .x_t = a.colwise,
                                      .rows = rows,
                                      .offs = offs,
                                      .main_grad = find_tensor(data, "main_grad2"),
                                      .w_dtype = settings.w2});
    dy_rows = {}, a = {};
    TokenPath::Grads of_rows{{}, needs.weights ? of_h.dweights : Tensor()};
    if (needs.x) {
      Quantized w13_t = take_w(saved, kSavedW13, plan13, settings.layout, memory);
      of_rows.x = linear_dgrad(plan13, of_h.dh.rowwise, w13_t, offs, settings.rows);
      of_h.dh.rowwise = {};
      memory.release(w13_t.data);
    }
    if (needs.x || needs.weights) {
      const TokenPath::Grads at_tokens = path->grads_from_experts(of_rows, own);
      out[kX] = at_tokens.x;
      out[kWeights] = at_tokens.weights;
    }
    of_rows = {};
    if (adds_b2 && own.weights)
      out[kWeights] = out[kWeights].add(b2_weight_gradient(of_b2, all_b2));
    if (needs.w13)
      out[kW13] = wgrad13(plan13,
                          {.dy_t = of_h.dh.colwise,
                           .x_t = path->x_again(plan13, settings.rows).colwise,
                           .rows = rows,
                           .offs = offs,
                           .main_grad = find_tensor(data, "main_grad13"),
                           .w_dtype = settings.w13},
                          settings.layout);
    return out;
  }
};

}  // namespace

Tensor run(Autograd autograd, const Args& args, const Call& call, TokenPath& path,
           const Needs& needs) {
  if (autograd == Autograd::kNo) return run_forward(args, call, path).y;
  const auto& [x, w13, w2, options] = args;
  return ExpertMlp::apply(x, w13, w2, path.token_rows().weights, options.b13, options.b2,
                          options.main_grad13, options.main_grad2, &call, &path, &needs);
}

}  // namespace moxie::ops::mlp
