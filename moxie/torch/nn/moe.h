// An MoE layer: router, permutation, experts and weighted sum; if asked for, also a shared expert
// that every token passes.
#pragma once

#include "moxie/torch/nn/experts.h"
#include "moxie/torch/nn/router.h"

namespace moxie::nn {

struct MoeOptions {
  RouterOptions router;
  int64_t hidden_dim = 0;
  int64_t shared_hidden_dim = 0;  // 0: no shared expert
  std::string recipe = "mxfp8_rceil_128";
  bool weight_cache = false;
  bool collect_stats = false;
  // These have the same meaning as in ExpertsOptions, for the routed experts and the shared one.
  std::string keep = "h";
  std::string activation = "swiglu";
  bool bias = false;
  std::string w13_layout = "concatenated";
  bool transposed = false;
};

class MoeImpl : public torch::nn::Module {
 public:
  explicit MoeImpl(const MoeOptions& options);

  at::Tensor forward(const at::Tensor& x);  // [.., D]
  void refresh();                           // quantizes the cached weights again

  Router router = nullptr;
  GroupedExperts experts = nullptr;
  SharedExperts shared = nullptr;
  at::Tensor loss;  // the router's loss in the last forward pass
};
TORCH_MODULE(Moe);

}  // namespace moxie::nn
