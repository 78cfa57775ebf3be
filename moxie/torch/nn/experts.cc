#include "moxie/torch/nn/experts.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/stack.h>
#include <torch/nn/init.h>

#include <cmath>

#include "moxie/torch/recipe.h"
#include "moxie/torch/view.h"
#include "moxie/torch/w13_layout.h"

namespace moxie::nn {
namespace {

constexpr const char* kLoad = "GroupedExperts.load_weights";

// Returns the given weights as [E, out, in]. Throws if their shape is not `expected`.
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

std::optional<at::Tensor> checked_bias(const std::optional<at::Tensor>& given, const char* name,
                                       at::IntArrayRef expected) {
  TORCH_CHECK_VALUE(!given || given->sizes() == expected, kLoad, ": ", name, " must be ", expected,
                    ", got ", given->sizes());
  return given;
}

}  // namespace

Matrices::Matrices(const std::vector<at::Tensor>& one_by_one) : tensor(at::stack(one_by_one)) {}

GroupedExpertsImpl::GroupedExpertsImpl(const ExpertsOptions& options)
    : Quantizable({"w13", "w2"}), options_(options) {
  TORCH_CHECK_VALUE(options.w13_layout == "concatenated" || options.w13_layout == "interleaved",
                    "GroupedExperts: w13_layout must be 'concatenated' or 'interleaved', got '",
                    options.w13_layout, "'");
  // Registers one linear of all experts: its weights [E, out, in] (or stored [E, in, out]) and its
  // biases [E, out].
  const auto linear = [&](const char* name, int64_t out, int64_t in) {
    const double bound = 1 / std::sqrt(static_cast<double>(in));
    const auto parameter = [&](std::string full_name, at::IntArrayRef sizes) {
      const at::Tensor made =
          register_parameter(std::move(full_name), at::empty(sizes, options.tensor));
      torch::nn::init::uniform_(made, -bound, bound);
      return made;
    };
    const int64_t experts = options.num_experts;
    const at::Tensor weight = options.transposed
                                  ? parameter(std::string("w") + name, {experts, in, out})
                                  : parameter(std::string("w") + name, {experts, out, in});
    const at::Tensor bias =
        options.bias ? parameter(std::string("b") + name, {experts, out}) : at::Tensor();
    return std::pair(weight, bias);
  };
  std::tie(w13, b13) = linear("13", 2 * options.hidden_dim, options.dim);
  std::tie(w2, b2) = linear("2", options.dim, options.hidden_dim);
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
  cache13_.emplace(w13, recipe, stored13());
  cache2_.emplace(w2, recipe, stored2());
}

Stored GroupedExpertsImpl::stored13() const {
  return {.transposed = options_.transposed, .interleaved = options_.w13_layout == "interleaved"};
}

void GroupedExpertsImpl::set_main_grads(const at::Tensor& of_w13, const at::Tensor& of_w2) {
  main_grad13_ = of_w13;
  main_grad2_ = of_w2;
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
                                .keep = options_.keep,
                                .activation = options_.activation,
                                .w13_layout = options_.w13_layout};
  const auto as_taken = [&](const at::Tensor& w) { return options_.transposed ? w.mT() : w; };
  if (main_grad13_.defined()) options.main_grad13 = as_taken(main_grad13_);
  if (main_grad2_.defined()) options.main_grad2 = as_taken(main_grad2_);
  if (b13.defined()) options.b13 = b13;
  if (b2.defined()) options.b2 = b2;
  if (cache13_) options.quantized_w13 = cache13_->tensors();
  if (cache2_) options.quantized_w2 = cache2_->tensors();
  if (!collects_stats()) return ops::expert_mlp(x, as_taken(w13), as_taken(w2), options);
  return ops::expert_mlp_stats(x, as_taken(w13), as_taken(w2), all_stats(x), options);
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
  TORCH_CHECK_VALUE(b13.defined() || (!weights.b13 && !weights.b2), kLoad,
                    ": these experts have no biases, got b13 or b2");
  const auto& [dim, hidden] = std::pair(options_.dim, options_.hidden_dim);
  const int64_t experts = options_.num_experts;
  const int64_t of_w13[] = {experts, 2 * hidden, dim}, of_w2[] = {experts, dim, hidden};
  const int64_t half[] = {experts, hidden, dim};
  const auto w1_given = checked(weights.w1, "w1", half, weights.transposed);
  const auto w3_given = checked(weights.w3, "w3", half, weights.transposed);
  auto w13_given = checked(weights.w13, "w13", of_w13, weights.transposed);
  const auto w2_given = checked(weights.w2, "w2", of_w2, weights.transposed);
  auto b13_given = checked_bias(weights.b13, "b13", {experts, 2 * hidden});
  const auto b2_given = checked_bias(weights.b2, "b2", {experts, dim});
  if (weights.interleaved) {
    if (w13_given) w13_given = ops::concatenated(*w13_given);
    if (b13_given) b13_given = ops::concatenated(*b13_given);
  }
  if (w1_given) w13_given = at::cat({*w1_given, *w3_given}, 1);
  const auto as_taken = [&](const at::Tensor& w) { return options_.transposed ? w.mT() : w; };
  // Copies rows of gate and up, which are given concatenated, into w13 or b13 in the layout in
  // which this module stores them.
  const auto copy13 = [&](const at::Tensor& own, const at::Tensor& given) {
    if (stored13().interleaved)
      ops::halves_of_interleaved(own).copy_(given.unflatten(1, {2, -1}));
    else
      own.copy_(given);
  };
  if (w13_given) copy13(as_taken(w13), *w13_given);
  if (b13_given) copy13(b13, *b13_given);
  if (w2_given) as_taken(w2).copy_(*w2_given);
  if (b2_given) b2.copy_(*b2_given);
  refresh();
}

SharedExpertsImpl::SharedExpertsImpl(ExpertsOptions options) {
  options.num_experts = 1;
  experts = register_module("experts", GroupedExperts(options));
}

}  // namespace moxie::nn
