// A decoder-only language model made of blocks, each with attention and then experts or one dense
// MLP.
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/pimpl.h>

#include <functional>
#include <string>
#include <vector>

#include "moxie/cli/train/config.h"
#include "moxie/torch/convert.h"
#include "moxie/torch/nn/linear.h"
#include "moxie/torch/nn/moe.h"

namespace moxie::cli {

// A function that forward calls with the input and output of each part of the model, in order;
// `name` is "layers.2.attention" and so on.
using Tap =
    std::function<void(const std::string& name, const at::Tensor& in, const at::Tensor& out)>;

class RmsNormImpl : public torch::nn::Module {
 public:
  RmsNormImpl(int64_t dim, const at::TensorOptions& tensor);
  at::Tensor forward(const at::Tensor& x);  // [.., D]

  at::Tensor weight;  // [D]
};
TORCH_MODULE(RmsNorm);

// Sines and cosines of the rotary angles, for each position and each pair of a head's dims.
struct Rope {
  at::Tensor cos, sin;  // f32 [S, head_dim / 2]
};

class AttentionImpl : public torch::nn::Module {
 public:
  AttentionImpl(const Config& config, const at::TensorOptions& tensor);
  at::Tensor forward(const at::Tensor& x, const Rope& rope);  // [B, S, D]

  nn::MxLinear wq = nullptr, wk = nullptr, wv = nullptr, wo = nullptr;

 private:
  int64_t heads_, kv_heads_, head_dim_;
};
TORCH_MODULE(Attention);

class BlockImpl : public torch::nn::Module {
 public:
  BlockImpl(const Config& config, int64_t index, const at::TensorOptions& tensor);
  at::Tensor forward(const at::Tensor& x, const Rope& rope, const Tap& tap);  // [B, S, D]

  RmsNorm attention_norm = nullptr, mlp_norm = nullptr;
  Attention attention = nullptr;
  nn::Moe moe = nullptr;             // in layers with experts
  nn::GroupedExperts mlp = nullptr;  // in dense layers

 private:
  std::string name_;
};
TORCH_MODULE(Block);

struct Losses {
  at::Tensor tokens;   // f32 []: mean negative log likelihood, in nats
  at::Tensor routers;  // f32 []: the sum of the routers' losses
};

class LanguageModelImpl : public torch::nn::Module {
 public:
  // Draws the weights from the config's seed: they are the same for every recipe and, except for
  // tensors of tens of millions of elements, on every device. On at::kMeta the model has only
  // shapes.
  LanguageModelImpl(const Config& config, c10::Device device);

  // The losses of a batch. windows: int64 [B, S + 1].
  Losses forward(const at::Tensor& windows, const Tap& tap = {});
  // Call it after each optimizer step: updates the bias of routers that balance their load by one,
  // and resets the counts of all.
  void update_routers();
  void each_moe(const std::function<void(const std::string& name, nn::MoeImpl& moe)>& visit);
  int64_t parameter_count() const;

 private:
  const Rope& rope(int64_t length, const at::Device& device);
  at::Tensor embed_, head_;  // [V, D]; head_ is undefined if it is tied to embed_
  torch::nn::ModuleList blocks_;
  RmsNorm norm_ = nullptr;
  Rope rope_;
  int64_t head_dim_;
  double rope_theta_;
};
TORCH_MODULE(LanguageModel);

// Resolves the config's recipes ("mxfp8_rceil_128", "experts=mxfp8_rceil_128", ..) to a recipe per
// module or pattern of modules.
NameToRecipe recipes_of(const Config& config);

// Makes the model without memory, and returns its number of parameters. Throws Error if a recipe is
// invalid or names no module.
int64_t check_model(const Config& config);

}  // namespace moxie::cli
