// The path of tokens over a process group. Between forward and backward this rank keeps the tokens
// that it received, each once, unquantized or in FP8, as they arrived.
#include "moxie/torch/autograd/expert_mlp_group.h"

#include <ATen/ops/arange.h>

#include <utility>

namespace moxie::ops::mlp {
namespace {

enum Saved : size_t {
  kSavedSlotOf,
  kSavedRowOf,
  kSavedTokenOf,  // these three: token_of, row_of_arrival and offs of Places
  kSavedRowOfArrival,
  kSavedOffs,
  kSavedRowToken,    // for each row of the experts, which received token it holds
  kSavedRowWeights,  // for each row of the experts, its routing weight
  kSavedX,           // the messages in which x arrived
  kSavedAllOffs,     // these two, only with b2: offs and weights of this rank's tokens
  kSavedTokenWeights,
  kSavedCount
};

class GroupPath final : public TokenPath {
 public:
  // Sends x, and queues everything up to the rows of the experts: until then the device has little
  // to do, and waits for the host.
  GroupPath(const GroupPathArgs& args, const XForWire& x)
      : args_(args), num_tokens_(args.rows.weights->size(0)) {
    Places& places = args_.agreed.places;
    received_ = dispatch_tokens({args_.group, places, x.tokens, "x"}, x.pairs);
    pairs_ = receive_pairs(received_, args_.agreed.counts, places);
    offs_ = places.offs;
    rows_ = rows_of(received_, places, pairs_.token_of);
  }

  GroupPath(variable_list&& saved, SavedData& data)
      : args_{Group(data["group"].toStringRef(), kOp),
              Wire{data["wire"].toInt()},
              {},
              {defined(saved[kSavedAllOffs]),
               {saved[kSavedSlotOf], saved[kSavedRowOf], data["top_k"].toInt()},
               defined(saved[kSavedTokenWeights])},
              data["x_dtype"].toScalarType(),
              data["has_b2"].toBool()},
        offs_(saved[kSavedOffs]),
        num_tokens_(data["num_tokens"].toInt()) {
    Places& places = args_.agreed.places;
    places.out = {data["out_tokens"].toIntVector(), data["out_pairs"].toIntVector()};
    places.in = {data["in_tokens"].toIntVector(), data["in_pairs"].toIntVector()};
    places.token_of = saved[kSavedTokenOf];
    places.row_of_arrival = saved[kSavedRowOfArrival];
    places.offs = saved[kSavedOffs];
    args_.agreed.flags = {.dx = data["sends_dx"].toBool(),
                          .dweights = data["sends_dweights"].toBool(),
                          .db2 = data["sends_db2"].toBool()};
    const auto format = data["x_format"].toIntVector();
    received_ = {saved[kSavedX],
                 {.data = static_cast<at::ScalarType>(format[0]),
                  .scale = static_cast<at::ScalarType>(format[1]),
                  .columns = format[2],
                  .scale_columns = format[3]},
                 kPairOfXBytes};
    pairs_ = {saved[kSavedRowToken], saved[kSavedRowWeights]};
  }

  QuantizedForms x_to_experts(const Plan& plan, const Tensor& /*tokens*/) override {
    const Quantized rows = std::exchange(rows_, {});
    return forms_of_received({plan, offs_, Role::kX, Need::kRowwise}, rows);
  }

  Tensor y_from_experts(const Tensor& rows) override {
    const Tensor back = combine_rows({args_.group, places(), rows, Tensor(), "y"}).rows;
    return unpermute(back, *permutation().slot_of, *permutation().row_of, num_tokens_,
                     args_.rows.weights);
  }

  void save(const Needs& needs, variable_list& saved, SavedData& data) const override {
    variable_list own(kSavedCount);
    own[kSavedSlotOf] = *permutation().slot_of;
    own[kSavedRowOf] = *permutation().row_of;
    own[kSavedTokenOf] = places().token_of.clone();  // it is a part of a tensor of all pairs
    own[kSavedRowOfArrival] = places().row_of_arrival;
    own[kSavedOffs] = places().offs;
    own[kSavedRowToken] = pairs_.token_of;
    own[kSavedRowWeights] = pairs_.weights;
    if (needs.w13) own[kSavedX] = received_.messages;
    if (args_.has_b2) {
      own[kSavedAllOffs] = *args_.rows.offs;
      own[kSavedTokenWeights] = *args_.rows.weights;
    }
    saved.insert(saved.end(), own.begin(), own.end());
    data["path"] = static_cast<int64_t>(PathKind::kGroup);
    const TokenFormat& format = received_.format;
    data["x_format"] =
        std::vector<int64_t>{static_cast<int64_t>(format.data), static_cast<int64_t>(format.scale),
                             format.columns, format.scale_columns};
    data["group"] = args_.group.name();
    data["wire"] = static_cast<int64_t>(args_.wire);
    data["out_tokens"] = places().out.tokens;
    data["out_pairs"] = places().out.pairs;
    data["in_tokens"] = places().in.tokens;
    data["in_pairs"] = places().in.pairs;
    data["sends_dx"] = args_.agreed.flags.dx;
    data["sends_dweights"] = args_.agreed.flags.dweights;
    data["sends_db2"] = args_.agreed.flags.db2;
    data["top_k"] = permutation().top_k;
    data["num_tokens"] = num_tokens_;
    data["x_dtype"] = args_.x_dtype;
    data["has_b2"] = args_.has_b2;
  }

  const OptionalTensor& offs() const override { return offs_; }

  // pairs_.weights has one weight for each row of the experts, in their order, so that slot_of
  // is 0, 1, 2, ..
  RowActivation weighted(Activation activation) const override {
    const Tensor& weights = pairs_.weights;
    return {activation, weights.unsqueeze(1),
            at::arange(weights.size(0), weights.options().dtype(at::kInt))};
  }
  TokenRows token_rows() const override { return args_.rows; }

  Needs all_needs(const Needs& own) const override {
    const CallFlags& agreed = args_.agreed.flags;
    Needs needs = own;
    needs.x = agreed.dx;
    needs.weights = agreed.dweights;
    needs.b2 = agreed.db2;
    return needs;
  }

  Dy dy_to_experts(const Plan& plan, const Tensor& dy, Need need, const Bias& bias) const override {
    const Quantized sent = for_wire(plan, args_.wire, Role::kDy, dy);
    const Quantized rows = rows_of(dispatch_tokens({args_.group, places(), sent, "dy"}, Tensor()),
                                   places(), pairs_.token_of);
    Dy made{forms_of_received({plan, offs_, Role::kDy, need}, rows), plan, {}};
    if (rows.scale) made.dgrad.layout = layout_of_received(plan);
    if (bias.db2.defined()) made.bias.db2 = sum_over_ranks(bias.db2);
    if (bias.b2.defined()) made.bias.b2 = of_all_experts(bias.b2);
    return made;
  }

  QuantizedForms x_again(const Plan& plan, at::ScalarType /*rows_dtype*/) const override {
    const FormsWanted wanted{plan, offs_, Role::kX, Need::kColwise};
    const TokenFormat& format = received_.format;
    if (format.scale_columns > 0) {
      const auto apart = [&](int64_t column) {
        return rows_apart(received_, places(), pairs_.token_of, column);
      };
      if (const auto made = colwise_of_received(
              wanted, {apart(0), apart(format.data_bytes()), format.columns, format.scale_columns}))
        return {{}, *made};
    }
    return forms_of_received(wanted, rows_of(received_, places(), pairs_.token_of));
  }

  Grads grads_from_experts(const Grads& of_rows, const Needs& own) const override {
    const Tensor of_pairs = of_rows.weights.defined() ? of_rows.weights.flatten() : Tensor();
    const Combined back = combine_rows({args_.group, places(), of_rows.x, of_pairs, "dx"});
    const auto& [slot_of, row_of, top_k] = permutation();
    Grads grads;
    if (own.x) grads.x = unpermute(back.rows.to(args_.x_dtype), *slot_of, *row_of, num_tokens_);
    if (own.weights)
      grads.weights = back.of_pairs.index_select(0, *row_of).view({num_tokens_, top_k});
    return grads;
  }

 private:
  Tensor of_all_experts(const Tensor& of_own) const {
    const std::vector<int64_t> each(ranks(), of_own.size(0));
    return args_.group.all_to_all(of_own.repeat({args_.group.size(), 1}), {each, each}, "b2");
  }

  // Of all experts, over this rank's tokens -> of this rank's experts, over all tokens.
  Tensor sum_over_ranks(const Tensor& of_all) const {
    const std::vector<int64_t> each(ranks(), of_all.size(0) / args_.group.size());
    return args_.group.all_to_all(dense(of_all), {each, each}, "db2")
        .unflatten(0, {args_.group.size(), each[0]})
        .sum(0);
  }

  const Places& places() const { return args_.agreed.places; }
  const Permutation& permutation() const { return args_.rows.permutation; }
  size_t ranks() const { return static_cast<size_t>(args_.group.size()); }

  GroupPathArgs args_;
  OptionalTensor offs_;
  int64_t num_tokens_;
  ReceivedTokens received_;
  ReceivedPairs pairs_;
  Quantized rows_;  // of x, until the product has read them
};

}  // namespace

std::unique_ptr<TokenPath> group_path(const GroupPathArgs& args, const XForWire& x) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return std::make_unique<GroupPath>(args, x);
}

std::unique_ptr<TokenPath> restored_group_path(variable_list&& saved, SavedData& data) {
  return std::make_unique<GroupPath>(std::move(saved), data);
}

}  // namespace moxie::ops::mlp
