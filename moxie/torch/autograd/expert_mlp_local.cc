// expert_mlp in one process: x is tokens, which a permutation turns into rows, or it is rows
// already.
#include <torch/library.h>

#include "moxie/torch/autograd/expert_mlp_path.h"

namespace moxie::ops {
namespace mlp {
namespace {

enum Saved : size_t { kSavedOffs, kSavedX, kSavedSlotOf, kSavedRowOf, kSavedWeights, kSavedCount };

class LocalPath final : public TokenPath {
 public:
  LocalPath(const Tensor& x, const ExpertMlpOptions& options)
      : offs_(options.offs),
        permutation_{options.slot_of, options.row_of, options.top_k},
        weights_(options.weights),
        x_(x),
        x_dtype_(x.scalar_type()),
        num_tokens_(x.sym_size(0)) {}
  LocalPath(variable_list&& saved, SavedData& data)
      : offs_(defined(saved[kSavedOffs])),
        permutation_{defined(saved[kSavedSlotOf]), defined(saved[kSavedRowOf]),
                     data["top_k"].toInt()},
        weights_(defined(saved[kSavedWeights])),
        x_(std::move(saved[kSavedX])),
        x_dtype_(data["x_dtype"].toScalarType()),
        num_tokens_(data["num_tokens"].toSymInt()) {}

  QuantizedForms x_to_experts(const Plan& plan, const Tensor& tokens) override {
    return quantize_permuted({plan, offs_, Role::kX, Need::kRowwise}, tokens, permutation_);
  }

  Tensor y_from_experts(const Tensor& rows) override {
    if (!weights_) return rows;
    return unpermute(rows, *permutation_.slot_of, *permutation_.row_of, num_tokens_, weights_);
  }

  void save(const Needs& needs, variable_list& saved, SavedData& data) const override {
    variable_list own(kSavedCount);
    own[kSavedOffs] = offs_.value_or(Tensor());
    if (needs.w13) own[kSavedX] = x_;
    own[kSavedSlotOf] = permutation_.slot_of.value_or(Tensor());
    own[kSavedRowOf] = permutation_.row_of.value_or(Tensor());
    own[kSavedWeights] = weights_.value_or(Tensor());
    saved.insert(saved.end(), own.begin(), own.end());
    data["path"] = static_cast<int64_t>(PathKind::kLocal);
    data["top_k"] = permutation_.top_k;
    data["x_dtype"] = x_dtype_;
    data["num_tokens"] = num_tokens_;
  }

  const OptionalTensor& offs() const override { return offs_; }
  RowActivation weighted(Activation activation) const override {
    return {activation, weights_, weights_ ? permutation_.slot_of : std::nullopt};
  }
  TokenRows token_rows() const override {
    return {offs_, weights_ ? permutation_ : Permutation{}, weights_};
  }

  Dy dy_to_experts(const Plan& plan, const Tensor& dy, Need need, const Bias& bias) const override {
    return {quantize_permuted({plan, offs_, Role::kDy, need}, dy, token_rows().permutation), plan,
            bias};
  }

  QuantizedForms x_again(const Plan& plan, at::ScalarType rows_dtype) const override {
    return quantize_permuted({plan, offs_, Role::kX, Need::kColwise}, x_.to(rows_dtype),
                             permutation_);
  }

  Grads grads_from_experts(const Grads& of_rows, const Needs& /*own*/) const override {
    Grads grads{{}, of_rows.weights};
    if (!of_rows.x.defined()) return grads;
    grads.x = of_rows.x.to(x_dtype_);
    if (permutation_.slot_of)
      grads.x = unpermute(grads.x, *permutation_.slot_of, *permutation_.row_of, num_tokens_);
    return grads;
  }

 private:
  OptionalTensor offs_;
  Permutation permutation_;
  OptionalTensor weights_;
  Tensor x_;
  at::ScalarType x_dtype_;
  c10::SymInt num_tokens_;
};

}  // namespace

std::unique_ptr<TokenPath> restored_local_path(variable_list&& saved, SavedData& data) {
  return std::make_unique<LocalPath>(std::move(saved), data);
}

}  // namespace mlp

namespace {

using mlp::Autograd;

template <Autograd kAutograd>
Tensor call_expert_mlp(const mlp::Args& args, const OptionalTensor& stats) {
  return with_op(mlp::kOp, [&] {
    const mlp::Needs needs = mlp::needs_of<kAutograd>(args, args.options.weights);
    mlp::Call call = mlp::checked_call(args, needs);
    if (stats) {
      mlp::check_stats(*stats, args.x);
      call.stats = stats;
    }
    mlp::LocalPath path(args.x, args.options);
    return mlp::run(kAutograd, args, call, path, needs);
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
