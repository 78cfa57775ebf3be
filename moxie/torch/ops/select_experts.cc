#include "moxie/torch/ops/select_experts.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/ones_like.h>
#include <torch/csrc/autograd/graph_task.h>

#include "moxie/torch/exec.h"
#include "moxie/torch/ops/register.h"

namespace moxie::ops {
namespace {

constexpr const char* kOp = "select_experts";

void check_logits(const Tensor& logits) {
  const auto dtype = logits.scalar_type();
  TORCH_CHECK_TYPE(dtype == at::kFloat || dtype == at::kDouble, kOp,
                   ": logits must be torch.float32, got ", dtype_name(dtype));
  TORCH_CHECK_VALUE(logits.dim() == 2, kOp, ": logits must be [tokens, experts], got ",
                    logits.dim(), " dims");
}

Tensor composite_scores(const Tensor& logits, Score score) {
  return score == Score::kSoftmax ? logits.softmax(-1) : logits.sigmoid();
}

void check_choice(const Tensor& logits, const OptionalTensor& bias, int64_t k) {
  check_logits(logits);
  const c10::SymInt experts = logits.sym_size(1);
  TORCH_CHECK_VALUE(k >= 1 && k <= kMaxTopK && experts.sym_ge(k).expect_true(__FILE__, __LINE__),
                    kOp, ": k must be 1 to the ", experts, " experts and at most ", kMaxTopK,
                    ", got ", k);
  if (!bias) return;
  check_shape({kOp, "bias", *bias}, {experts});
  check_device({kOp, "bias", *bias}, logits);
}

// Where the core writes: counts may be undefined, if they are not wanted.
struct Choice {
  const Tensor &weights, &ids, &counts;
  Counts how_counts;
};

void run(const Tensor& logits, const OptionalTensor& bias, const Weighting& how,
         const Choice& out) {
  const DeviceScope scope(logits.device());
  const Tensor from = dense(logits);
  const OptionalTensor f32_bias = bias ? OptionalTensor(dense(bias->to(at::kFloat))) : bias;
  SelectArgs args{.logits = const_view<float>(from),
                  .bias = std::nullopt,
                  .weighting = how,
                  .ids = view<int32_t>(out.ids),
                  .weights = view<float>(out.weights),
                  .counts = {},
                  .how_counts = out.how_counts};
  if (f32_bias) args.bias = const_view<float>(*f32_bias);
  if (out.counts.defined()) args.counts = view<int64_t>(out.counts);
  select(args, scope.exec());
}

std::tuple<Tensor, Tensor, Tensor> select_experts_op(const Tensor& logits,
                                                     const OptionalTensor& bias, int64_t k,
                                                     bool sigmoid, bool normalize, double scale) {
  return with_op(kOp, [&] {
    const Weighting how = weighting_of(sigmoid, normalize, scale);
    check_choice(logits, bias, k);
    const c10::SymInt tokens = logits.sym_size(0), experts = logits.sym_size(1);
    const auto out = allocate({{"weights", logits.scalar_type(), {tokens, k}},
                               {"ids", at::kInt, {tokens, k}},
                               {"counts", at::kLong, {experts}}},
                              logits);
    const auto results = std::tuple(out[0], out[1], out[2]);
    if (logits.is_meta()) return results;
    if (logits.scalar_type() == at::kDouble) {
      const DeviceScope scope(logits.device());
      const Tensor scores = composite_scores(logits, how.score);
      const Tensor ranked = dense((bias ? scores + *bias : scores).to(at::kFloat));
      top_k({.scores = const_view<float>(ranked), .ids = view<int32_t>(out[1])}, scope.exec());
      out[0].copy_(composite_weights(logits, out[1], how));
      const Tensor flat = out[1].flatten().to(at::kLong);
      out[2].zero_().scatter_add_(0, flat, at::ones_like(flat));
      return results;
    }
    run(logits, bias, how, {out[0], out[1], out[2], Counts::kOverwritten});
    return results;
  });
}

std::tuple<Tensor, Tensor> select_experts_once_op(const Tensor& logits, const OptionalTensor& bias,
                                                  int64_t k, bool sigmoid, bool normalize,
                                                  double scale, const OptionalTensor& load) {
  return with_op(kOp, [&] {
    constexpr int kNoBackward = -1;
    const Weighting how = weighting_of(sigmoid, normalize, scale);
    check_choice(logits, bias, k);
    TORCH_CHECK_TYPE(logits.scalar_type() == at::kFloat, kOp, ": logits must be torch.float32");
    if (load) check_out(kOp, {{"load", at::kLong, {logits.sym_size(1)}}}, {*load}, {logits, bias});
    const SymShape shape{logits.sym_size(0), k};
    const auto out = allocate({{"weights", at::kFloat, shape}, {"ids", at::kInt, shape}}, logits);
    if (logits.is_meta()) return std::tuple(out[0], out[1]);
    const bool adds = load && torch::autograd::get_current_graph_task_id() == kNoBackward;
    run(logits, bias, how,
        {out[0], out[1], adds ? *load : Tensor(), adds ? Counts::kAddedTo : Counts::kNotWanted});
    if (adds) mark_written({*load});
    return std::tuple(out[0], out[1]);
  });
}

Tensor select_experts_backward_op(const Tensor& dweights, const Tensor& logits, const Tensor& ids,
                                  bool sigmoid, bool normalize, double scale) {
  return with_op(kOp, [&] {
    const Weighting how = weighting_of(sigmoid, normalize, scale);
    TORCH_CHECK_TYPE(logits.scalar_type() == at::kFloat && dweights.scalar_type() == at::kFloat,
                     kOp, ": logits and dweights must be torch.float32, got ",
                     dtype_name(logits.scalar_type()), " and ", dtype_name(dweights.scalar_type()));
    TORCH_CHECK_TYPE(ids.scalar_type() == at::kInt, kOp, ": ids must be torch.int32, got ",
                     dtype_name(ids.scalar_type()));
    check_logits(logits);
    check_shape({kOp, "ids", ids}, {logits.sym_size(0), ids.sym_size(1)});
    check_shape({kOp, "dweights", dweights}, sym_shape(ids));
    check_device({kOp, "ids", ids}, logits);
    check_device({kOp, "dweights", dweights}, logits);
    const Tensor dlogits = allocate({{"dlogits", at::kFloat, sym_shape(logits)}}, logits)[0];
    if (logits.is_meta()) return dlogits;
    const DeviceScope scope(logits.device());
    const Tensor of_weights = dense(dweights), from = dense(logits), chosen = dense(ids);
    select_backward({.dweights = const_view<float>(of_weights),
                     .logits = const_view<float>(from),
                     .ids = const_view<int32_t>(chosen),
                     .weighting = how,
                     .dlogits = view<float>(dlogits)},
                    scope.exec());
    return dlogits;
  });
}

void register_ops(torch::Library& m) {
  m.impl("_select_experts", TORCH_FN(select_experts_op));
  m.impl("_select_experts_once", TORCH_FN(select_experts_once_op));
  m.impl("_select_experts_backward", TORCH_FN(select_experts_backward_op));
}

}  // namespace

Tensor composite_weights(const Tensor& logits, const Tensor& ids, const Weighting& how) {
  Tensor weights = composite_scores(logits, how.score).gather(1, ids.to(at::kLong));
  if (how.normalize) {
    constexpr double kTiny = std::numeric_limits<double>::min();
    weights = weights / weights.sum(-1, /*keepdim=*/true).clamp_min(kTiny);
  }
  return how.scale == 1 ? weights : weights * how.scale;
}

MOXIE_REGISTER_OPS(register_ops)

}  // namespace moxie::ops
