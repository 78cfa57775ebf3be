// The configuration of a training run. config.cc lists the fields once; flags, JSON, checks and
// help are derived from its list.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace moxie::cli {

using Words = std::vector<std::string>;

struct Config {
  std::string preset = "tiny";
  // the model
  int64_t vocab = 256;
  int64_t dim = 128;
  int64_t layers = 2;
  int64_t heads = 4;
  int64_t kv_heads = 2;
  int64_t head_dim = 32;
  int64_t experts = 8;
  int64_t top_k = 2;
  int64_t hidden_dim = 128;
  int64_t shared_hidden_dim = 0;
  int64_t dense_layers = 0;
  int64_t dense_hidden_dim = 512;
  std::string score = "sigmoid";
  std::string balance = "bias";
  double bias_rate = 1e-2;
  double loss_weight = 1e-2;
  double z_loss_weight = 0;
  double rope_theta = 10000;
  bool tied_head = false;
  // the data
  Words data = {};
  int64_t seq_len = 128;
  double held_out = 0.05;
  // the training
  int64_t steps = 800;
  int64_t batch = 16;
  int64_t accumulate = 1;
  double lr = 5e-4;
  double min_lr = 0;
  int64_t warmup = 80;
  double beta1 = 0.9;
  double beta2 = 0.95;
  double eps = 1e-8;
  double weight_decay = 0.1;
  double clip = 1;
  int64_t seed = 1;
  std::string dtype = "bf16";
  Words recipe = {"mxfp8_rceil_128"};
  std::string kept_activations = "h";
  std::string init = "";
  std::string on_nan = "stop";
  // the run
  std::string out = "";
  std::string device = "auto";
  int64_t threads = 0;
  int64_t eval_every = 50;
  int64_t eval_windows = 256;
  int64_t final_eval_windows = 4096;
  int64_t save_every = 100;
  int64_t keep = 3;
  int64_t stats_every = 25;
  std::string save_weights = "";
  std::string title = "";

  int64_t tokens_per_step() const { return batch * seq_len * accumulate; }
  bool operator==(const Config&) const = default;
};

enum class Part : uint8_t {
  kModel,
  kData,
  kTraining,  // kModel, kData and kTraining determine a run's results
  kRun,       // may change when a run is resumed
};

struct Field {
  using Member = std::variant<int64_t Config::*, double Config::*, bool Config::*,
                              std::string Config::*, Words Config::*>;
  std::string_view name;  // as in JSON; the flag has dashes for underscores
  Part part;
  Member member;
  std::string_view help;
  double least = 0, most = 0;               // limits of a number
  std::vector<std::string_view> choices{};  // allowed words; empty: any text

  std::string flag() const;
};

const std::vector<Field>& fields();

struct Preset {
  std::string_view name;
  std::string_view what;
  Config config;
};
const std::vector<Preset>& presets();
Config preset(std::string_view name);

// The following functions throw Error, which names the field, the rule and the value.
void set_from_words(Config& config, const Field& field, const Words& words);
void set_from_json(Config& config, const nlohmann::ordered_json& json, std::string_view where);
Config read_config(const std::string& path, const Config& base);
// Reads a config that an earlier run wrote. Fields that did not exist then get the value that has
// the behaviour of that version.
Config saved_config(const nlohmann::ordered_json& json, std::string_view where);
Config read_saved_config(const std::string& path);
void check(const Config& config);

nlohmann::ordered_json to_json(const Config& config);

}  // namespace moxie::cli
