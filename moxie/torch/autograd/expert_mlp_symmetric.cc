// expert_mlp.symmetric: expert_mlp with the experts split over ranks that share memory
// (exchange/symmetric.h). The host knows no number of rows: tensors of rows have as many as the
// limits say, and those past the last end of offs are never read. Between forward and backward it
// keeps the tokens it received, once each, out of the shared memory.
#include <ATen/ops/arange.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include "moxie/torch/autograd/expert_mlp_over_ranks.h"
#include "moxie/torch/autograd/expert_mlp_path.h"
#include "moxie/torch/exchange/symmetric.h"

namespace moxie::ops {
namespace mlp {
namespace {

enum Saved : size_t {
  kSavedSlots,
  kSavedExperts,
  kSavedOwn,
  kSavedRowToken,
  kSavedRowWeights,
  kSavedX,
  kSavedXScale,
  kSavedOffs,  // these four, only with b2: the route of this rank's tokens
  kSavedSlotOf,
  kSavedRowOf,
  kSavedWeights,
  kSavedCount
};

struct SymmetricPathArgs {
  Symmetric symmetric;
  Wire wire;
  TokenRows rows;  // of this rank's tokens, in the experts of all ranks
  at::ScalarType x_dtype;
  int32_t signature = 0;
  bool keeps_x = false;
  bool has_b2 = false;
};

class SymmetricPath final : public TokenPath {
 public:
  explicit SymmetricPath(SymmetricPathArgs args) : args_(std::move(args)) {}

  SymmetricPath(variable_list&& saved, SavedData& data)
      : args_{Symmetric(kOp, {.memory = data["memory"].toTensor(),
                              .status = data["status"].toTensor(),
                              .peers = data["peers"].toIntVector(),
                              .capacity = data["capacity"].toIntVector(),
                              .limits = data["limits"].toIntVector(),
                              .rank = data["rank"].toInt(),
                              .timeout_ms = data["timeout_ms"].toInt(),
                              .group = data["group"].toStringRef()}),
              Wire{data["wire"].toInt()},
              {defined(saved[kSavedOffs]),
               {defined(saved[kSavedSlotOf]), defined(saved[kSavedRowOf]), data["top_k"].toInt()},
               defined(saved[kSavedWeights])},
              data["x_dtype"].toScalarType(),
              /*signature=*/0,
              /*keeps_x=*/false,
              data["has_b2"].toBool()},
        places_{saved[kSavedSlots], saved[kSavedExperts], saved[kSavedOwn],
                data["num_tokens"].toInt(), data["top_k"].toInt()},
        pairs_{saved[kSavedRowToken], saved[kSavedRowWeights]},
        x_{saved[kSavedX], defined(saved[kSavedXScale])} {
    set_offs();
  }

  QuantizedForms x_to_experts(const Plan& plan, const Tensor& tokens) override {
    const Symmetric& symmetric = args_.symmetric;
    places_ = symmetric.places(*args_.rows.offs, *args_.rows.permutation.row_of,
                               *args_.rows.weights, args_.signature);
    set_offs();
    const Quantized sent = send(plan.recipe, tokens, Step::kX);
    pairs_ = symmetric.pairs(places_);
    if (args_.keeps_x) x_ = symmetric.received(sent, places_);
    return forms_of_received({plan, offs_, Role::kX, Need::kRowwise},
                             symmetric.rows(sent, places_, pairs_.token));
  }

  Tensor y_from_experts(const Tensor& rows) override {
    return args_.symmetric.combine({rows, {}}, places_, args_.rows.weights, Step::kY).x;
  }

  void save(const Needs& needs, variable_list& saved, SavedData& data) const override {
    variable_list own(kSavedCount);
    own[kSavedSlots] = places_.slots;
    own[kSavedExperts] = places_.experts;
    own[kSavedOwn] = places_.own;
    own[kSavedRowToken] = pairs_.token;
    own[kSavedRowWeights] = pairs_.weight;
    if (needs.w13) {
      own[kSavedX] = x_.data;
      own[kSavedXScale] = x_.scale.value_or(Tensor());
    }
    if (args_.has_b2) {
      own[kSavedOffs] = *args_.rows.offs;
      own[kSavedSlotOf] = *args_.rows.permutation.slot_of;
      own[kSavedRowOf] = *args_.rows.permutation.row_of;
      own[kSavedWeights] = *args_.rows.weights;
    }
    saved.insert(saved.end(), own.begin(), own.end());
    // Not as saved variables: the memory is written all the time, and hooks may copy those.
    const SymmetricArgs& shared = args_.symmetric.args();
    data["path"] = static_cast<int64_t>(PathKind::kSymmetric);
    data["memory"] = shared.memory;
    data["status"] = shared.status;
    data["peers"] = shared.peers;
    data["capacity"] = shared.capacity;
    data["limits"] = shared.limits;
    data["rank"] = shared.rank;
    data["timeout_ms"] = shared.timeout_ms;
    data["group"] = shared.group;
    data["wire"] = static_cast<int64_t>(args_.wire);
    data["x_dtype"] = args_.x_dtype;
    data["num_tokens"] = places_.tokens;
    data["top_k"] = places_.top_k;
    data["has_b2"] = args_.has_b2;
  }

  const OptionalTensor& offs() const override { return offs_; }

  // Row r of the experts has the weight r.
  RowActivation weighted(Activation activation) const override {
    return {activation, pairs_.weight.unsqueeze(1),
            at::arange(pairs_.weight.size(0), places_.experts.options())};
  }
  TokenRows token_rows() const override { return args_.rows; }

  // The host does not know what other ranks want: they may want each of these gradients.
  Needs all_needs(const Needs& own) const override {
    Needs needs = own;
    if (args_.symmetric.size() == 1) return needs;
    needs.x = needs.weights = own.any();
    needs.b2 = args_.has_b2 && own.any();
    return needs;
  }

  Dy dy_to_experts(const Plan& plan, const Tensor& dy, Need need, const Bias& bias) const override {
    const Symmetric::Bias own{bias.b2, bias.db2};
    if (args_.has_b2) args_.symmetric.send_bias(own);
    const Quantized sent = send(plan.recipe, dy, Step::kDy);
    const Quantized rows = args_.symmetric.rows(sent, places_, pairs_.token);
    Dy made{forms_of_received({plan, offs_, Role::kDy, need}, rows), plan, {}};
    if (rows.scale) made.dgrad.layout = layout_of_received(plan);
    if (args_.has_b2) {
      // Now: the barrier of dx lets peers write their next biases.
      const Symmetric::Bias all = args_.symmetric.receive_bias(own);
      made.bias = {all.b2, all.sums.defined() ? all.sums.sum(0) : Tensor()};
    }
    return made;
  }

  QuantizedForms x_again(const Plan& plan, at::ScalarType /*rows_dtype*/) const override {
    const FormsWanted wanted{plan, offs_, Role::kX, Need::kColwise};
    if (x_.scale) {
      const Tensor index = pairs_.token.to(at::kLong);
      if (const auto made = colwise_of_received(
              wanted, {rows_of_matrix(x_.data, index), rows_of_matrix(*x_.scale, index),
                       x_.data.size(1), x_.scale->size(1)}))
        return {{}, *made};
    }
    return forms_of_received(wanted, args_.symmetric.rows_of(x_, places_, pairs_.token));
  }

  Grads grads_from_experts(const Grads& of_rows, const Needs& own) const override {
    const Tensor rows = of_rows.x.defined() ? of_rows.x.to(args_.x_dtype) : Tensor();
    const Tensor of_pairs = of_rows.weights.defined() ? of_rows.weights.flatten() : Tensor();
    const Symmetric::AtTokens made =
        args_.symmetric.combine({rows, of_pairs}, places_, {}, Step::kDx);
    return {own.x ? made.x : Tensor(), own.weights ? made.of_slots : Tensor()};
  }

 private:
  Quantized send(const Recipe& recipe, const Tensor& tokens, Step step) const {
    if (args_.wire == Wire::kFp8)
      return args_.symmetric.send_quantized(tokens, recipe.activations, recipe.rule, places_, step);
    const Quantized sent{tokens, {}};
    args_.symmetric.send(sent, places_, step);
    return sent;
  }
  void set_offs() { offs_ = places_.experts.narrow(0, 0, args_.symmetric.local_experts()); }

  SymmetricPathArgs args_;
  Symmetric::Places places_;
  Symmetric::Pairs pairs_;
  Quantized x_;  // the tokens received
  OptionalTensor offs_;
};

}  // namespace

std::unique_ptr<TokenPath> restored_symmetric_path(variable_list&& saved, SavedData& data) {
  return std::make_unique<SymmetricPath>(std::move(saved), data);
}

}  // namespace mlp

namespace {

using mlp::Autograd;
using mlp::kOp;

template <Autograd kAutograd>
Tensor call_symmetric(const mlp::ParallelArgs& args, const SymmetricArgs& shared) {
  const Symmetric symmetric(kOp, shared);
  check_parallel(args, symmetric.size());
  check_device({kOp, "memory", shared.memory}, args.x);
  if (args.options.b2) {
    check_shape({kOp, "b2", *args.options.b2}, {args.w2.sym_size(0), args.w2.sym_size(1)});
    symmetric.check_bias(*args.options.b2);
  }
  check_status(kOp, shared);
  ExpertMlpOptions options = args.options;
  const Recipe recipe = parse_recipe(options.recipe, kOp);
  const mlp::Wire wire = mlp::parse_wire(args.wire, recipe);
  const mlp::Args of_mlp{args.x, args.w13, args.w2, options};
  mlp::Needs needs = mlp::needs_of<kAutograd>(of_mlp, args.weights);
  const bool keeps_x = needs.w13;
  const int64_t top_k = args.weights.size(1);
  mlp::SymmetricPath path(
      {symmetric,
       wire,
       {mlp::ends_in_order(args), {dense(args.slot_of), dense(args.row_of), top_k}, args.weights},
       args.x.scalar_type(),
       mlp::signature_of(args, recipe, wire) ^ static_cast<int32_t>(needs.any()),
       keeps_x,
       args.options.b2.has_value()});
  needs = path.all_needs(needs);
  options.offs = at::zeros({args.w13.size(0)}, args.offs.options());  // its shape is what counts
  const mlp::Call call = mlp::call_of_received(args, options, symmetric.limits().rows, needs, wire);
  return mlp::run(kAutograd, of_mlp, call, path, needs);
}

template <Autograd kAutograd>
Tensor expert_mlp_symmetric_kernel(
    const Tensor& x, const Tensor& w13, const Tensor& w2, const Tensor& weights, const Tensor& offs,
    const Tensor& slot_of, const Tensor& row_of, const Tensor& memory, const Tensor& status,
    at::IntArrayRef peers, at::IntArrayRef capacity, at::IntArrayRef limits, int64_t rank,
    int64_t timeout_ms, std::string_view group, std::string_view recipe, std::string_view wire,
    OptionalTensors quantized_w13, OptionalTensors quantized_w2, const OptionalTensor& main_grad13,
    const OptionalTensor& main_grad2, std::string_view keep, std::optional<at::ScalarType> x_dtype,
    std::string_view activation, const OptionalTensor& b13, const OptionalTensor& b2,
    std::string_view w13_layout) {
  const ExpertMlpOptions options = mlp::options_of(
      /*offs=*/{}, recipe, quantized_w13, quantized_w2, main_grad13, main_grad2, /*slot_of=*/{},
      /*row_of=*/{}, /*top_k=*/1, /*weights=*/{}, keep, x_dtype, activation, b13, b2, w13_layout);
  const mlp::ParallelArgs args{x,    w13,    w2, weights, offs, slot_of, row_of, std::string(group),
                               wire, options};
  const SymmetricArgs shared{memory,       status, peers.vec(), capacity.vec(),
                             limits.vec(), rank,   timeout_ms,  std::string(group)};
  return with_op(kOp, [&] { return call_symmetric<kAutograd>(args, shared); });
}

}  // namespace

TORCH_LIBRARY_IMPL(moxie, Autograd, m) {
  m.impl("expert_mlp.symmetric", TORCH_FN(expert_mlp_symmetric_kernel<Autograd::kYes>));
}
TORCH_LIBRARY_IMPL(moxie, CompositeExplicitAutograd, m) {
  m.impl("expert_mlp.symmetric", TORCH_FN(expert_mlp_symmetric_kernel<Autograd::kNo>));
}

}  // namespace moxie::ops
