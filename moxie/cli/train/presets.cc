#include "moxie/cli/text.h"
#include "moxie/cli/train/config.h"
#include "moxie/core/base/check.h"

namespace moxie::cli {
namespace {

Config named(std::string_view name, Config config) {
  config.preset = name;
  return config;
}

}  // namespace

// The presets. The large ones are sized by memory: 20 bytes per parameter (bf16 weight and
// gradient; float32 master, gradient and two moments), plus what a step saves for backward. Their
// final evaluation reads 256 windows of 4096 tokens, twice as many tokens as that of the tiny
// preset.
const std::vector<Preset>& presets() {
  static const std::vector<Preset> all = {
      {"tiny", "1 million parameters: a CPU trains it in a minute or two", named("tiny", {})},
      {"small", "100 million parameters: a GPU trains it in minutes",
       named("small", {.dim = 512,
                       .layers = 8,
                       .heads = 8,
                       .kv_heads = 4,
                       .head_dim = 64,
                       .experts = 16,
                       .top_k = 2,
                       .hidden_dim = 512,
                       .seq_len = 512,
                       .steps = 1000,
                       .batch = 32,
                       .lr = 1e-3,
                       .min_lr = 0.1,
                       .warmup = 100})},
      {"dsv3", "4 billion parameters in DeepSeek-V3's shapes: fills an H200",
       named("dsv3", {.dim = 7168,
                      .layers = 4,
                      .heads = 56,
                      .kv_heads = 8,
                      .head_dim = 128,
                      .experts = 24,
                      .top_k = 8,
                      .hidden_dim = 2048,
                      .shared_hidden_dim = 2048,
                      .dense_layers = 1,
                      .dense_hidden_dim = 18432,
                      .bias_rate = 1e-3,
                      .seq_len = 4096,
                      .steps = 200,
                      .batch = 4,
                      .lr = 2e-4,
                      .min_lr = 0.1,
                      .warmup = 20,
                      .eval_windows = 64,
                      .final_eval_windows = 256})},
      {"llama4", "4 billion parameters in Llama 4's shapes: fills an H200",
       named("llama4", {.dim = 5120,
                        .layers = 2,
                        .heads = 40,
                        .kv_heads = 8,
                        .head_dim = 128,
                        .experts = 14,
                        .top_k = 1,
                        .hidden_dim = 8192,
                        .shared_hidden_dim = 8192,
                        .bias_rate = 1e-3,
                        .rope_theta = 500000,
                        .seq_len = 4096,
                        .steps = 200,
                        .batch = 8,
                        .lr = 2e-4,
                        .min_lr = 0.1,
                        .warmup = 20,
                        .eval_windows = 64,
                        .final_eval_windows = 256})},
  };
  return all;
}

Config preset(std::string_view name) {
  std::vector<std::string_view> names;
  for (const Preset& known : presets()) {
    if (known.name == name) return known.config;
    names.push_back(known.name);
  }
  fail("--preset must be one of ", join(names, ", "), ", got '", name, "'",
       did_you_mean(name, names));
}

}  // namespace moxie::cli
