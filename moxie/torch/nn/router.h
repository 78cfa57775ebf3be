// Router: chooses the experts of each token and their weights.
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include "moxie/core/select/select.h"

namespace moxie::nn {

using moxie::Score;

enum class Balance : uint8_t {
  kNone,
  kBias,  // a bias per expert, for the choice alone, which update_bias() moves against the load
  kLoss,  // the classic auxiliary loss
};

struct RouterOptions {
  int64_t dim = 0;
  int64_t num_experts = 0;
  int64_t top_k = 0;
  Score score = Score::kSoftmax;
  bool normalize = true;  // the weights of a token add up to 1
  double scale = 1;       // and are multiplied by this
  Balance balance = Balance::kNone;
  double bias_rate = 1e-3;
  double loss_weight = 1e-2;
  double z_loss_weight = 0;
  at::TensorOptions tensor = {};
};

struct Routing {
  at::Tensor ids;      // int32 [T, k]
  at::Tensor weights;  // f32 [T, k]
  at::Tensor loss;     // f32 []; 0 where none is asked for
};

// Not a torch::nn::Linear, so that it is never quantized.
struct GateImpl : torch::nn::Module {
  explicit GateImpl(const RouterOptions& options);
  at::Tensor weight;  // [E, D]
};
TORCH_MODULE(Gate);

class RouterImpl : public torch::nn::Module {
 public:
  explicit RouterImpl(const RouterOptions& options);

  Routing forward(const at::Tensor& x);  // [T, D]
  // Lowers the bias of experts above the mean load by bias_rate, raises the others, and resets the
  // load.
  void update_bias();
  void reset_load();
  // int64 [E]: rows of each expert in training since reset_load(), where the module last ran. Not a
  // part of the state dict, and nothing here reads it.
  const at::Tensor& load() const { return load_; }
  using torch::nn::Module::load;  // an archive

  // The bias stays f32: bf16 cannot hold updates as small as bias_rate.
  void to(torch::Device device, torch::Dtype dtype, bool non_blocking = false) override;
  void to(torch::Dtype dtype, bool non_blocking = false) override;
  void to(torch::Device device, bool non_blocking = false) override;

  const RouterOptions& options() const { return options_; }
  Gate gate = nullptr;
  at::Tensor bias;  // f32 [E], kBias

 private:
  at::Tensor loss_of(const at::Tensor& logits, const at::Tensor& counts);
  RouterOptions options_;
  at::Tensor load_;
};
TORCH_MODULE(Router);

}  // namespace moxie::nn
