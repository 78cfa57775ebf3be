#include "moxie/cli/train/optimizer.h"

#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <cmath>
#include <numbers>

namespace moxie::cli {

AdamW::AdamW(LanguageModelImpl& model, const Config& config) : config_(config) {
  const at::NoGradGuard no_grad;
  for (const auto& item : model.named_parameters()) {
    const at::Tensor& parameter = item.value();
    const at::Tensor master = parameter.detach().to(at::kFloat, /*non_blocking=*/false,
                                                    /*copy=*/true);
    weights_.push_back({.name = item.key(),
                        .parameter = parameter,
                        .master = master,
                        .grad = at::zeros_like(master),
                        .mean = at::zeros_like(master),
                        .square = at::zeros_like(master)});
  }
  const at::TensorOptions options = weights_.front().master.options();
  step_ = at::zeros({}, options);
  scale_ = at::zeros({}, options);
}

void AdamW::accumulate() {
  const at::NoGradGuard no_grad;
  for (Weight& weight : weights_) {
    at::Tensor& grad = weight.parameter.mutable_grad();
    if (!grad.defined()) continue;
    weight.grad.add_(grad);
    grad.reset();
  }
}

at::Tensor AdamW::grad_norm() const {
  std::vector<at::Tensor> grads;
  for (const Weight& weight : weights_) grads.push_back(weight.grad);
  return at::stack(at::_foreach_norm(grads)).norm();
}

void AdamW::drop_gradients() {
  for (Weight& weight : weights_) weight.grad.zero_();
}

void AdamW::step(int64_t step, double norm) {
  const at::NoGradGuard no_grad;
  step_.fill_(static_cast<double>(step + 1));
  // The fused kernel divides gradients by scale_, which clips their norm.
  scale_.fill_(config_.clip > 0 ? std::max(1.0, norm / config_.clip) : 1.0);
  for (const bool matrices : {false, true}) {
    std::vector<at::Tensor> masters, grads, means, squares, steps;
    for (const Weight& weight : weights_) {
      if ((weight.master.dim() > 1) != matrices) continue;
      masters.push_back(weight.master);
      grads.push_back(weight.grad);
      means.push_back(weight.mean);
      squares.push_back(weight.square);
      steps.push_back(step_);
    }
    at::_fused_adamw_(masters, grads, means, squares, /*max_exp_avg_sqs=*/{}, steps,
                      learning_rate(config_, step), config_.beta1, config_.beta2,
                      matrices ? config_.weight_decay : 0.0, config_.eps, /*amsgrad=*/false,
                      /*maximize=*/false, scale_);
  }
  write_weights();
  drop_gradients();
}

void AdamW::write_weights() {
  const at::NoGradGuard no_grad;
  for (const Weight& weight : weights_) weight.parameter.copy_(weight.master);
}

double learning_rate(const Config& config, int64_t step) {
  const auto done = static_cast<double>(step), warmup = static_cast<double>(config.warmup);
  if (step < config.warmup) return config.lr * (done + 1) / (warmup + 1);
  const double decay_steps = std::max(1.0, static_cast<double>(config.steps) - warmup);
  const double share = std::min(1.0, (done - warmup) / decay_steps);
  const double cosine = (1 + std::cos(std::numbers::pi * share)) / 2;
  return config.lr * (config.min_lr + (1 - config.min_lr) * cosine);
}

}  // namespace moxie::cli
