// MxLinear: y = x w^T + bias with any leading dims. Its three products (forward, dgrad, wgrad) are
// quantized as a recipe says. Its parameters are named as those of torch::nn::Linear.
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <optional>

#include "moxie/torch/nn/quantizable.h"
#include "moxie/torch/weight_cache.h"

namespace moxie::nn {

struct MxLinearOptions {
  int64_t in_features = 0;
  int64_t out_features = 0;
  bool bias = true;
  std::string recipe = "mxfp8_rceil_128";
  bool weight_cache = false;  // if true, call refresh() after every optimizer step
  at::TensorOptions tensor = {};
};

class MxLinearImpl : public torch::nn::Module, public Quantizable {
 public:
  explicit MxLinearImpl(const MxLinearOptions& options);

  at::Tensor forward(const at::Tensor& x);  // [.., in] -> [.., out]
  const std::string& recipe() const override { return options_.recipe; }
  void set_recipe(const std::string& recipe) override;
  void set_weight_cache(bool on) override;
  void refresh() override;

  const MxLinearOptions& options() const { return options_; }
  at::Tensor weight;  // [out, in]
  at::Tensor bias;    // [out]

 private:
  MxLinearOptions options_;
  std::optional<WeightCache> cache_;  // of weight, as [1, out, in]
};
TORCH_MODULE(MxLinear);

}  // namespace moxie::nn
