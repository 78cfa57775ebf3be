// The MLPs of all experts, w13 [E, 2F, D] (the gate above the up projection) and w2 [E, D, F].
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <optional>
#include <string>

#include "moxie/torch/nn/quantizable.h"
#include "moxie/torch/weight_cache.h"

namespace moxie::nn {

struct ExpertsOptions {
  int64_t dim = 0;
  int64_t hidden_dim = 0;
  int64_t num_experts = 1;
  std::string recipe = "mxfp8_rceil_128";
  bool weight_cache = false;  // then call refresh() after every optimizer step
  at::TensorOptions tensor = {};
};

// Weights as other models keep them; whatever is absent stays as it is.
struct ExpertWeights {
  std::optional<at::Tensor> w1 = std::nullopt;   // gate [E, F, D], with w3
  std::optional<at::Tensor> w3 = std::nullopt;   // up [E, F, D]
  std::optional<at::Tensor> w13 = std::nullopt;  // [E, 2F, D]
  std::optional<at::Tensor> w2 = std::nullopt;   // [E, D, F]
  bool transposed = false;                       // matrices are [in, out]
};

class GroupedExpertsImpl : public torch::nn::Module, public Quantizable {
 public:
  explicit GroupedExpertsImpl(const ExpertsOptions& options);

  // rows [R, D] in groups -> [R, D]; without offs there is one expert
  at::Tensor forward(const at::Tensor& rows, const std::optional<at::Tensor>& offs = std::nullopt);
  void refresh();
  const std::string& recipe() const override { return options_.recipe; }
  void set_recipe(const std::string& recipe) override;
  void load_weights(const ExpertWeights& weights);

  const ExpertsOptions& options() const { return options_; }
  at::Tensor w13, w2;

 private:
  ExpertsOptions options_;
  std::optional<WeightCache> cache13_, cache2_;
};
TORCH_MODULE(GroupedExperts);

}  // namespace moxie::nn
