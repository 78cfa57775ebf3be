#include "moxie/cli/train/model.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/ops/_scaled_dot_product_attention_math.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/outer.h>
#include <ATen/ops/pow.h>
#include <ATen/ops/rms_norm.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/zeros.h>

#include <cmath>

#include "moxie/core/base/check.h"

namespace moxie::cli {
namespace {

constexpr double kInitStd = 0.02;

// Tensors of up to this many elements are drawn on the CPU, so that they start with the same bits
// on every device. In the presets tiny and small that is all of them: the largest has half as many.
// A core draws about 150 million numbers per second, and billions would take minutes, so larger
// tensors are drawn on the GPU.
constexpr int64_t kMostFromCpu = 1 << 24;

// Fills a weight with normal random numbers. They are drawn in float32: the dtype of the weight
// only decides how they are rounded.
void draw(const at::Tensor& weight, double std, const at::Generator& of_cpu) {
  const bool from_cpu = weight.is_cpu() || weight.numel() <= kMostFromCpu;
  const c10::Device device = from_cpu ? c10::Device(c10::kCPU) : weight.device();
  const at::Generator generator =
      from_cpu ? of_cpu : at::globalContext().defaultGenerator(weight.device());
  weight.copy_(at::empty(weight.sizes(), at::TensorOptions(at::kFloat).device(device))
                   .normal_(0, std, generator));
}

// On a CPU, windows shorter than this use one GEMM for all heads, which takes a third of the time:
// torch's blocked attention makes a small GEMM for each head and block, and each has a set-up cost.
constexpr int64_t kBlockedWindow = 256;

at::Tensor causal_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
  const bool grouped = q.size(1) != k.size(1);
  if (q.is_cpu() && q.size(2) < kBlockedWindow)
    return std::get<0>(at::_scaled_dot_product_attention_math(
        q, k, v, /*attn_mask=*/std::nullopt, /*dropout_p=*/0, /*is_causal=*/true,
        /*dropout_mask=*/std::nullopt, /*scale=*/std::nullopt, grouped));
  return at::scaled_dot_product_attention(q, k, v, /*attn_mask=*/std::nullopt, /*dropout_p=*/0,
                                          /*is_causal=*/true, /*scale=*/std::nullopt, grouped);
}

nn::MxLinear linear(int64_t in, int64_t out, const at::TensorOptions& tensor) {
  return nn::MxLinear(nn::MxLinearOptions{
      .in_features = in, .out_features = out, .bias = false, .recipe = "bf16", .tensor = tensor});
}

// Rotates q or k by position (rotary embedding); pairs are dims i and i + head_dim / 2.
at::Tensor rotate(const at::Tensor& x, const Rope& rope) {
  const std::vector<at::Tensor> halves = x.to(at::kFloat).chunk(2, -1);
  const at::Tensor &a = halves[0], &b = halves[1];
  return at::cat({a * rope.cos - b * rope.sin, b * rope.cos + a * rope.sin}, -1).to(x.dtype());
}

nn::MoeOptions moe_options(const Config& config, const at::TensorOptions& tensor) {
  nn::RouterOptions router{.dim = config.dim,
                           .num_experts = config.experts,
                           .top_k = config.top_k,
                           .bias_rate = config.bias_rate,
                           .loss_weight = config.loss_weight,
                           .z_loss_weight = config.z_loss_weight,
                           .tensor = tensor};
  router.score = config.score == "softmax" ? nn::Score::kSoftmax : nn::Score::kSigmoid;
  router.balance = config.balance == "bias"   ? nn::Balance::kBias
                   : config.balance == "loss" ? nn::Balance::kLoss
                                              : nn::Balance::kNone;
  return {.router = router,
          .hidden_dim = config.hidden_dim,
          .shared_hidden_dim = config.shared_hidden_dim,
          .recipe = "bf16",
          .keep = config.kept_activations};
}

}  // namespace

RmsNormImpl::RmsNormImpl(int64_t dim, const at::TensorOptions& tensor)
    : weight(register_parameter("weight", at::ones({dim}, tensor))) {}

at::Tensor RmsNormImpl::forward(const at::Tensor& x) {
  return at::rms_norm(x, {weight.size(0)}, weight, 1e-6);
}

AttentionImpl::AttentionImpl(const Config& config, const at::TensorOptions& tensor)
    : heads_(config.heads), kv_heads_(config.kv_heads), head_dim_(config.head_dim) {
  wq = register_module("wq", linear(config.dim, heads_ * head_dim_, tensor));
  wk = register_module("wk", linear(config.dim, kv_heads_ * head_dim_, tensor));
  wv = register_module("wv", linear(config.dim, kv_heads_ * head_dim_, tensor));
  wo = register_module("wo", linear(heads_ * head_dim_, config.dim, tensor));
}

at::Tensor AttentionImpl::forward(const at::Tensor& x, const Rope& rope) {
  const int64_t batch = x.size(0), length = x.size(1);
  const auto split = [&](const at::Tensor& y, int64_t heads) {
    return y.view({batch, length, heads, head_dim_}).transpose(1, 2);
  };
  const at::Tensor q = rotate(split(wq(x), heads_), rope);
  const at::Tensor k = rotate(split(wk(x), kv_heads_), rope);
  const at::Tensor y = causal_attention(q, k, split(wv(x), kv_heads_));
  return wo(y.transpose(1, 2).reshape({batch, length, heads_ * head_dim_}));
}

BlockImpl::BlockImpl(const Config& config, int64_t index, const at::TensorOptions& tensor)
    : name_("layers." + std::to_string(index)) {
  attention_norm = register_module("attention_norm", RmsNorm(config.dim, tensor));
  attention = register_module("attention", Attention(config, tensor));
  mlp_norm = register_module("mlp_norm", RmsNorm(config.dim, tensor));
  if (config.experts > 0 && index >= config.dense_layers)
    moe = register_module("moe", nn::Moe(moe_options(config, tensor)));
  else
    mlp = register_module(
        "mlp", nn::GroupedExperts(nn::ExpertsOptions{.dim = config.dim,
                                                     .hidden_dim = config.dense_hidden_dim,
                                                     .recipe = "bf16",
                                                     .keep = config.kept_activations,
                                                     .tensor = tensor}));
}

at::Tensor BlockImpl::forward(const at::Tensor& x, const Rope& rope, const Tap& tap) {
  const auto seen = [&](const char* part, const at::Tensor& in, const at::Tensor& out) {
    if (tap) tap(name_ + part, in, out);
    return out;
  };
  const at::Tensor for_attention = attention_norm(x);
  const at::Tensor h = x + seen(".attention", for_attention, attention(for_attention, rope));
  const at::Tensor for_mlp = mlp_norm(h);
  if (moe) return h + seen(".moe", for_mlp, moe(for_mlp));
  const at::Tensor rows = for_mlp.reshape({-1, for_mlp.size(-1)});
  return h + seen(".mlp", rows, mlp(rows, std::optional<at::Tensor>())).view_as(h);
}

LanguageModelImpl::LanguageModelImpl(const Config& config, c10::Device device)
    : head_dim_(config.head_dim), rope_theta_(config.rope_theta) {
  const at::TensorOptions tensor =
      at::device(device).dtype(config.dtype == "bf16" ? at::kBFloat16 : at::kFloat);
  const auto table = [&](const char* name) {
    return register_parameter(name, at::zeros({config.vocab, config.dim}, tensor));
  };
  embed_ = table("embed");
  register_module("layers", blocks_);
  for (int64_t i = 0; i < config.layers; ++i) blocks_->push_back(Block(config, i, tensor));
  norm_ = register_module("norm", RmsNorm(config.dim, tensor));
  if (!config.tied_head) head_ = table("head");

  if (device.is_meta()) return;
  const at::NoGradGuard no_grad;
  const auto seed = static_cast<uint64_t>(config.seed);
  const auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  if (!device.is_cpu()) {
    at::Generator of_gpu = at::globalContext().defaultGenerator(device);
    of_gpu.set_current_seed(seed);
  }
  // The outputs of a layer's two parts are added to the residual stream, and their variances add
  // up, so their weights start smaller.
  const double out_std = kInitStd / std::sqrt(2.0 * static_cast<double>(config.layers));
  for (const auto& item : named_parameters()) {
    if (item.value().dim() < 2) continue;  // the weights of norms stay 1
    const bool out = item.key().ends_with("wo.weight") || item.key().ends_with("w2");
    draw(item.value(), out ? out_std : kInitStd, generator);
  }
}

const Rope& LanguageModelImpl::rope(int64_t length, const at::Device& device) {
  if (rope_.cos.defined() && rope_.cos.size(0) == length && rope_.cos.device() == device)
    return rope_;
  const auto options = at::TensorOptions(at::kDouble);
  const at::Tensor pair = at::arange(0, head_dim_, 2, options) / static_cast<double>(head_dim_);
  const at::Tensor angle = at::outer(at::arange(length, options), at::pow(rope_theta_, -pair));
  const auto to_device = [&](const at::Tensor& x) { return x.to(device, at::kFloat); };
  return rope_ = {to_device(angle.cos()), to_device(angle.sin())};
}

Losses LanguageModelImpl::forward(const at::Tensor& windows, const Tap& tap) {
  const int64_t length = windows.size(1) - 1;
  const at::Tensor inputs = windows.narrow(1, 0, length), targets = windows.narrow(1, 1, length);
  at::Tensor x = at::embedding(embed_, inputs);
  at::Tensor routers = at::zeros({}, x.options().dtype(at::kFloat));
  for (const auto& module : *blocks_) {
    auto& block = *module->as<BlockImpl>();
    x = block.forward(x, rope(length, windows.device()), tap);
    if (block.moe) routers = routers + block.moe->loss;
  }
  const at::Tensor last = norm_(x), logits = at::linear(last, head_.defined() ? head_ : embed_);
  if (tap) tap("head", last, logits);
  return {at::cross_entropy_loss(logits.flatten(0, 1).to(at::kFloat), targets.flatten()), routers};
}

void LanguageModelImpl::each_moe(
    const std::function<void(const std::string&, nn::MoeImpl&)>& visit) {
  for (const auto& item : named_modules())
    if (auto* moe = item.value()->as<nn::MoeImpl>()) visit(item.key(), *moe);
}

void LanguageModelImpl::update_routers() {
  each_moe([](const std::string&, nn::MoeImpl& moe) {
    if (moe.router->options().balance == nn::Balance::kBias)
      moe.router->update_bias();
    else
      moe.router->reset_load();
  });
}

int64_t LanguageModelImpl::parameter_count() const {
  int64_t count = 0;
  for (const at::Tensor& parameter : parameters()) count += parameter.numel();
  return count;
}

NameToRecipe recipes_of(const Config& config) {
  // As is common practice, no pattern here names the head, the routers or the narrow wk and wv:
  // they are not quantized.
  const bool has_experts = config.experts > 0 && config.dense_layers < config.layers;
  const std::string experts = "re:.*\\.(experts|shared)", linears = "re:.*\\.(wq|wo|mlp)";
  NameToRecipe general, special;
  for (const std::string& word : config.recipe) {
    // "=" separates part and recipe only before a ":", because after one the fields of a recipe
    // contain "=".
    const size_t start = word.starts_with("re:") ? 3 : 0;
    const size_t split = word.find('=', start);
    if (split == word.npos || word.find(':', start) < split) {
      if (has_experts) general.emplace_back(experts, word);
      general.emplace_back(linears, word);
      continue;
    }
    const std::string part = word.substr(0, split), recipe = word.substr(split + 1);
    MOXIE_CHECK(!part.empty() && !recipe.empty(), "--recipe must be NAME or PART=NAME, got '", word,
                "'");
    special.emplace_back(part == "experts" ? experts : part == "linears" ? linears : part, recipe);
  }
  special.insert(special.end(), general.begin(), general.end());  // they come first, so they win
  return special;
}

int64_t check_model(const Config& config) {
  LanguageModel model(config, at::kMeta);
  quantize(*model, recipes_of(config));
  return model->parameter_count();
}

}  // namespace moxie::cli
