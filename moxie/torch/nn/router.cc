#include "moxie/torch/nn/router.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/sign.h>
#include <ATen/ops/zeros.h>
#include <torch/nn/init.h>

#include <cmath>

#include "moxie/torch/ops.h"

namespace moxie::nn {
namespace {

double tiny_of(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kDouble ? std::numeric_limits<double>::min()
                                             : std::numeric_limits<float>::min();
}

}  // namespace

GateImpl::GateImpl(const RouterOptions& options) {
  weight =
      register_parameter("weight", at::empty({options.num_experts, options.dim}, options.tensor));
  const double bound = 1 / std::sqrt(static_cast<double>(options.dim));
  torch::nn::init::uniform_(weight, -bound, bound);
}

RouterImpl::RouterImpl(const RouterOptions& options) : options_(options) {
  TORCH_CHECK_VALUE(options.top_k >= 1 && options.top_k <= options.num_experts,
                    "Router: top_k must be 1 to the ", options.num_experts, " experts, got ",
                    options.top_k);
  gate = register_module("gate", Gate(options));
  if (options.balance == Balance::kBias)
    bias =
        register_buffer("bias", at::zeros({options.num_experts}, options.tensor.dtype(at::kFloat)));
  load_ = at::zeros({options.num_experts}, options.tensor.dtype(at::kLong));
}

void RouterImpl::to(torch::Device device, torch::Dtype dtype, bool non_blocking) {
  to(device, non_blocking);
  to(dtype, non_blocking);
}

void RouterImpl::to(torch::Dtype dtype, bool non_blocking) {
  const at::Tensor kept = bias.defined() ? bias.detach() : bias;
  Module::to(dtype, non_blocking);
  if (kept.defined()) bias.set_data(kept);
}

void RouterImpl::to(torch::Device device, bool non_blocking) {
  Module::to(device, non_blocking);
  load_ = load_.to(device, non_blocking);
}

Routing RouterImpl::forward(const at::Tensor& x) {
  const at::Tensor logits = ops::gate_logits(x, gate->weight);
  const auto for_choice = bias.defined() ? std::optional(bias) : std::nullopt;
  const auto [weights, ids, counts] =
      ops::select_experts(logits, for_choice, options_.top_k,
                          {.sigmoid = options_.score == Score::kSigmoid,
                           .normalize = options_.normalize,
                           .scale = options_.scale});
  if (is_training()) ops::add_once_(load_, counts);
  return {ids, weights, loss_of(logits, counts)};
}

at::Tensor RouterImpl::loss_of(const at::Tensor& logits, const at::Tensor& counts) {
  at::Tensor loss = at::zeros({}, logits.options());
  const auto tokens = static_cast<double>(std::max<int64_t>(logits.size(0), 1));
  if (options_.balance == Balance::kLoss) {
    // The balance loss: E * sum over experts of (share of the rows) * (mean probability). It is 1
    // if the load is even.
    const at::Tensor scores =
        options_.score == Score::kSoftmax ? logits.softmax(-1) : logits.sigmoid();
    const at::Tensor probability = scores / scores.sum(-1, true).clamp_min(tiny_of(scores));
    const at::Tensor share =
        counts.to(scores.scalar_type()) / (tokens * static_cast<double>(options_.top_k));
    loss = loss + options_.loss_weight * static_cast<double>(options_.num_experts) *
                      (share * probability.sum(0) / tokens).sum();
  }
  if (options_.z_loss_weight != 0)
    loss = loss + options_.z_loss_weight * logits.logsumexp(-1).square().sum() / tokens;
  return loss;
}

void RouterImpl::update_bias() {
  TORCH_CHECK_VALUE(options_.balance == Balance::kBias,
                    "Router: update_bias is for routers whose balance is kBias");
  const at::NoGradGuard no_grad;
  const at::Tensor counts = load_.to(at::kFloat);
  bias.add_(at::sign(counts.mean() - counts), options_.bias_rate);
  reset_load();
}

void RouterImpl::reset_load() {
  const at::NoGradGuard no_grad;
  load_.zero_();
}

}  // namespace moxie::nn
