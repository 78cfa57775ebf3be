#include "moxie/torch/nn/experts.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/stack.h>
#include <torch/nn/init.h>

#include <cmath>

#include "moxie/torch/recipe.h"
#include "moxie/torch/view.h"

namespace moxie::nn {
namespace {

constexpr const char* kLoad = "GroupedExperts.load_weights";

// What was given, as [E, out, in]. Refuses another shape than `expected`.
std::optional<at::Tensor> checked(const std::optional<Matrices>& given, const char* name,
                                  at::IntArrayRef expected, bool transposed) {
  if (!given) return std::nullopt;
  const at::Tensor& w = given->tensor;
  TORCH_CHECK_VALUE(w.dim() == 3, kLoad, ": ", name, " must be a matrix per expert, got ",
                    w.sizes());
  const at::Tensor turned = transposed ? w.mT() : w;
  TORCH_CHECK_VALUE(turned.sizes() == expected, kLoad, ": ", name, " must be ", expected, ", got ",
                    turned.sizes(), turned.mT().sizes() == expected ? " (is it transposed?)" : "");
  return turned;
}

}  // namespace

Matrices::Matrices(const std::vector<at::Tensor>& one_by_one) : tensor(at::stack(one_by_one)) {}

GroupedExpertsImpl::GroupedExpertsImpl(const ExpertsOptions& options)
    : Quantizable({"w13", "w2"}), options_(options) {
  w13 = register_parameter(
      "w13", at::empty({options.num_experts, 2 * options.hidden_dim, options.dim}, options.tensor));
  w2 = register_parameter(
      "w2", at::empty({options.num_experts, options.dim, options.hidden_dim}, options.tensor));
  for (const at::Tensor& weight : {w13, w2}) {
    const double bound = 1 / std::sqrt(static_cast<double>(weight.size(-1)));
    torch::nn::init::uniform_(weight, -bound, bound);
  }
  set_recipe(options.recipe);
  collect_stats(options.collect_stats);
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

void GroupedExpertsImpl::set_weight_cache(bool on) {
  options_.weight_cache = on;
  set_recipe(options_.recipe);
}

at::Tensor GroupedExpertsImpl::forward(const at::Tensor& x, const std::optional<at::Tensor>& offs,
                                       const ops::Permutation& permutation,
                                       const std::optional<at::Tensor>& weights) {
  if (has_moved()) set_recipe(options_.recipe);
  ops::ExpertMlpOptions options{.offs = offs,
                                .recipe = options_.recipe,
                                .slot_of = permutation.slot_of,
                                .row_of = permutation.row_of,
                                .top_k = permutation.top_k,
                                .weights = weights,
                                .keep = options_.keep};
  if (cache13_) options.quantized_w13 = cache13_->tensors();
  if (cache2_) options.quantized_w2 = cache2_->tensors();
  if (!collects_stats()) return ops::expert_mlp(x, w13, w2, options);
  return ops::expert_mlp_stats(x, w13, w2, all_stats(x), options);
}

bool GroupedExpertsImpl::has_moved() const {
  return cache13_ && cache13_->tensors()[0].device() != w13.device();
}

void GroupedExpertsImpl::refresh() {
  if (has_moved()) return set_recipe(options_.recipe);
  if (cache13_) cache13_->refresh();
  if (cache2_) cache2_->refresh();
}

void GroupedExpertsImpl::load_weights(const ExpertWeights& weights) {
  const at::NoGradGuard no_grad;
  TORCH_CHECK_VALUE(
      weights.w1.has_value() == weights.w3.has_value() && !(weights.w1 && weights.w13), kLoad,
      ": give w1 and w3 together, or w13 alone");
  const at::IntArrayRef of_w13 = w13.sizes();
  const int64_t half[] = {of_w13[0], of_w13[1] / 2, of_w13[2]};
  const auto w1_given = checked(weights.w1, "w1", half, weights.transposed);
  const auto w3_given = checked(weights.w3, "w3", half, weights.transposed);
  auto w13_given = checked(weights.w13, "w13", of_w13, weights.transposed);
  const auto w2_given = checked(weights.w2, "w2", w2.sizes(), weights.transposed);
  if (w1_given) w13_given = at::cat({*w1_given, *w3_given}, 1);
  if (w13_given) w13.copy_(*w13_given);
  if (w2_given) w2.copy_(*w2_given);
  refresh();
}

SharedExpertsImpl::SharedExpertsImpl(ExpertsOptions options) {
  options.num_experts = 1;
  experts = register_module("experts", GroupedExperts(options));
}

}  // namespace moxie::nn
