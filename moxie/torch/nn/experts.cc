#include "moxie/torch/nn/experts.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <torch/nn/init.h>

#include <cmath>

#include "moxie/torch/ops.h"
#include "moxie/torch/recipe.h"
#include "moxie/torch/view.h"

namespace moxie::nn {

GroupedExpertsImpl::GroupedExpertsImpl(const ExpertsOptions& options) : options_(options) {
  w13 = register_parameter(
      "w13", at::empty({options.num_experts, 2 * options.hidden_dim, options.dim}, options.tensor));
  w2 = register_parameter(
      "w2", at::empty({options.num_experts, options.dim, options.hidden_dim}, options.tensor));
  for (const at::Tensor& weight : {w13, w2}) {
    const double bound = 1 / std::sqrt(static_cast<double>(weight.size(-1)));
    torch::nn::init::uniform_(weight, -bound, bound);
  }
  set_recipe(options.recipe);
}

void GroupedExpertsImpl::set_recipe(const std::string& recipe) {
  const ops::Recipe parsed =
      ops::with_op("GroupedExperts", [&] { return ops::parse_recipe(recipe, "GroupedExperts"); });
  options_.recipe = recipe;
  cache13_.reset();
  cache2_.reset();
  if (!options_.weight_cache || !parsed.quantizes()) return;
  cache13_.emplace(w13, recipe);
  cache2_.emplace(w2, recipe);
}

at::Tensor GroupedExpertsImpl::forward(const at::Tensor& rows,
                                       const std::optional<at::Tensor>& offs) {
  ops::ExpertMlpOptions options{.offs = offs, .recipe = options_.recipe};
  if (cache13_) options.quantized_w13 = cache13_->tensors();
  if (cache2_) options.quantized_w2 = cache2_->tensors();
  return ops::expert_mlp(rows, w13, w2, options);
}

void GroupedExpertsImpl::refresh() {
  if (cache13_) cache13_->refresh();
  if (cache2_) cache2_->refresh();
}

void GroupedExpertsImpl::load_weights(const ExpertWeights& weights) {
  const at::NoGradGuard no_grad;
  TORCH_CHECK_VALUE(
      weights.w1.has_value() == weights.w3.has_value() && !(weights.w1 && weights.w13),
      "GroupedExperts: give w1 and w3 together, or w13 alone");
  const auto turned = [&](const at::Tensor& w) { return weights.transposed ? w.mT() : w; };
  const auto copy = [](const char* name, const at::Tensor& own, const at::Tensor& given) {
    TORCH_CHECK_VALUE(own.sizes() == given.sizes(), "GroupedExperts: ", name, " must be ",
                      own.sizes(), ", got ", given.sizes());
    own.copy_(given);
  };
  if (weights.w1) copy("w13", w13, at::cat({turned(*weights.w1), turned(*weights.w3)}, 1));
  if (weights.w13) copy("w13", w13, turned(*weights.w13));
  if (weights.w2) copy("w2", w2, turned(*weights.w2));
  refresh();
}

}  // namespace moxie::nn
