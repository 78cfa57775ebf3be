// Router: chooses the experts of each token and their weights.
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include "moxie/core/select/select.h"

namespace moxie::nn {

using moxie::Score;

enum class Balance : uint8_t {
  kNone,
  kBias,  // a bias per expert, used in the choice only; update_bias() lowers it where load is high
  kLoss,  // the classic auxiliary loss
};

struct RouterOptions {
  int64_t dim = 0;
  int64_t num_experts = 0;
  int64_t top_k = 0;
  Score score = Score::kSoftmax;
  bool normalize = true;  // divides the weights of a token by their sum
  double scale = 1;       // multiplies the weights, after normalize
  Balance balance = Balance::kNone;
  double bias_rate = 1e-3;
  double loss_weight = 1e-2;
  double z_loss_weight = 0;
  at::TensorOptions tensor = {};
};

struct Routing {
  at::Tensor ids;      // int32 [T, k]
  at::Tensor weights;  // f32 [T, k]
  at::Tensor loss;     // f32 []; 0 if the options ask for no loss
};

// A class of its own rather than a torch::nn::Linear, so that no conversion quantizes it.
struct GateImpl : torch::nn::Module {
  explicit GateImpl(const RouterOptions& options);
  at::Tensor weight;  // [E, D]
};
TORCH_MODULE(Gate);

class RouterImpl : public torch::nn::Module {
 public:
  explicit RouterImpl(const RouterOptions& options);

  Routing forward(const at::Tensor& x);  // [T, D]
  // Lowers the bias of experts with more than the mean load by bias_rate, raises it for those with
  // less, then resets the load.
  void update_bias();
  void reset_load();
  // int64 [E]: how many rows each expert got in training since reset_load(), on the device on which
  // the module last ran. It is not part of the state dict, and forward does not read it.
  const at::Tensor& load() const { return load_; }
  using torch::nn::Module::load;  // the overload load(archive), which load() would hide

  // Convert the module, but keep the bias in f32: bf16 cannot hold updates as small as bias_rate.
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
