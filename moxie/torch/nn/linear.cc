#include "moxie/torch/nn/linear.h"

#include <ATen/ops/empty.h>
#include <torch/nn/init.h>

#include <cmath>

#include "moxie/torch/ops.h"
#include "moxie/torch/recipe.h"
#include "moxie/torch/view.h"

namespace moxie::nn {

MxLinearImpl::MxLinearImpl(const MxLinearOptions& options)
    : Quantizable({"weight"}), options_(options) {
  set_recipe(options.recipe);
  weight = register_parameter(
      "weight", at::empty({options.out_features, options.in_features}, options.tensor));
  const double bound = 1 / std::sqrt(static_cast<double>(options.in_features));
  torch::nn::init::uniform_(weight, -bound, bound);
  if (!options.bias) return;
  bias = register_parameter("bias", at::empty({options.out_features}, options.tensor));
  torch::nn::init::uniform_(bias, -bound, bound);
}

at::Tensor MxLinearImpl::forward(const at::Tensor& x) {
  TORCH_CHECK_VALUE(x.dim() >= 1 && x.size(-1) == options_.in_features, "MxLinear: x must be [.., ",
                    options_.in_features, "], got ", x.sizes());
  ops::GroupedMmOptions options{.recipe = options_.recipe, .stats = stats_of(0, x)};
  if (bias.defined()) options.bias = bias;
  const at::Tensor y =
      ops::grouped_mm(x.reshape({-1, options_.in_features}), weight.unsqueeze(0), options);
  std::vector<int64_t> sizes = x.sizes().vec();
  sizes.back() = options_.out_features;
  return y.reshape(sizes);
}

void MxLinearImpl::set_recipe(const std::string& recipe) {
  ops::with_op("MxLinear", [&] { ops::parse_recipe(recipe, "MxLinear"); });
  options_.recipe = recipe;
}

}  // namespace moxie::nn
