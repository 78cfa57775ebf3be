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
  weight = register_parameter(
      "weight", at::empty({options.out_features, options.in_features}, options.tensor));
  const double bound = 1 / std::sqrt(static_cast<double>(options.in_features));
  torch::nn::init::uniform_(weight, -bound, bound);
  if (options.bias) {
    bias = register_parameter("bias", at::empty({options.out_features}, options.tensor));
    torch::nn::init::uniform_(bias, -bound, bound);
  }
  set_recipe(options.recipe);
}

at::Tensor MxLinearImpl::forward(const at::Tensor& x) {
  TORCH_CHECK_VALUE(x.dim() >= 1 && x.size(-1) == options_.in_features, "MxLinear: x must be [.., ",
                    options_.in_features, "], got ", x.sizes());
  ops::GroupedMmOptions options{.recipe = options_.recipe};
  if (bias.defined()) options.bias = bias;
  if (cache_ && cache_->tensors()[0].device() != weight.device())
    set_recipe(options_.recipe);  // the module was moved; its cache, which is no buffer, was not
  if (cache_) options.quantized_w = cache_->tensors();
  const at::Tensor rows = x.reshape({-1, options_.in_features}), w = weight.unsqueeze(0);
  const auto stats = stats_of(0, x);
  const at::Tensor y =
      stats ? ops::grouped_mm_stats(rows, w, *stats, options) : ops::grouped_mm(rows, w, options);
  std::vector<int64_t> sizes = x.sizes().vec();
  sizes.back() = options_.out_features;
  return y.reshape(sizes);
}

void MxLinearImpl::set_recipe(const std::string& recipe) {
  const ops::Recipe parsed =
      ops::with_op("MxLinear", [&] { return ops::parse_recipe(recipe, "MxLinear"); });
  options_.recipe = recipe;
  cache_.reset();
  if (options_.weight_cache && parsed.quantizes()) cache_.emplace(weight.unsqueeze(0), recipe);
}

void MxLinearImpl::set_weight_cache(bool on) {
  options_.weight_cache = on;
  set_recipe(options_.recipe);
}

void MxLinearImpl::refresh() {
  if (!cache_) return;
  // Quantizes the module's own weight, not through cache_->refresh(): the cache holds a view of the
  // weight as it was when the cache was made, and to() may have replaced the tensor since.
  const auto tensors = cache_->tensors();
  if (tensors[0].device() != weight.device()) return set_recipe(options_.recipe);
  ops::quantize_weights_out(weight.detach().unsqueeze(0), tensors[0], tensors[1], tensors[2],
                            tensors[3], options_.recipe);
}

}  // namespace moxie::nn
