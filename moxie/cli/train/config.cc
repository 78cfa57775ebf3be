#include "moxie/cli/train/config.h"

#include <charconv>
#include <cmath>

#include "moxie/cli/file/json.h"
#include "moxie/cli/file/mapped_file.h"
#include "moxie/cli/text.h"
#include "moxie/core/base/check.h"

namespace moxie::cli {
namespace {

using Json = nlohmann::ordered_json;

constexpr double kMany = 1e9;  // limit of counts: more than any use needs, and far from overflow

template <class T>
T parse_number(const std::string& word, const Field& field) {
  T value{};
  const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), value);
  MOXIE_CHECK(error == std::errc() && end == word.data() + word.size(), field.flag(), " must be ",
              std::is_integral_v<T> ? "an integer" : "a number", ", got '", word, "'");
  return value;
}

bool parse_bool(const std::string& word, const Field& field) {
  MOXIE_CHECK(word == "true" || word == "false", field.flag(), " must be true or false, got '",
              word, "'");
  return word == "true";
}

void check_number(const Field& field, double value) {
  MOXIE_CHECK(value >= field.least && value <= field.most, field.flag(), " must be ",
              short_number(field.least), " to ", short_number(field.most), ", got ",
              short_number(value));
}

// Checks a text value: it must be UTF-8, because configs are written as JSON, and have no zero
// byte, which would end a path.
void check_text(const Field& field, const std::string& word) {
  const auto drop = Json::error_handler_t::ignore;
  const bool is_utf8 = Json::parse(Json(word).dump(-1, ' ', false, drop)) == word;
  MOXIE_CHECK(is_utf8 && word.find('\0') == word.npos, field.flag(),
              " must be UTF-8 without zero bytes, got '", printable(word), "'");
}

void check_word(const Field& field, const std::string& word) {
  check_text(field, word);
  for (const std::string_view choice : field.choices)
    if (word == choice) return;
  MOXIE_CHECK(field.choices.empty(), field.flag(), " must be one of ", join(field.choices, ", "),
              ", got '", printable(word), "'");
}

void check_field(const Config& config, const Field& field) {
  std::visit(
      [&](const auto member) {
        using T = std::remove_cvref_t<decltype(config.*member)>;
        if constexpr (std::is_same_v<T, int64_t> || std::is_same_v<T, double>)
          check_number(field, static_cast<double>(config.*member));
        else if constexpr (std::is_same_v<T, std::string>)
          check_word(field, config.*member);
        else if constexpr (std::is_same_v<T, Words>)
          for (const std::string& word : config.*member) check_text(field, word);
      },
      field.member);
}

const Field* find_field(std::string_view name) {
  for (const Field& field : fields())
    if (field.name == name) return &field;
  return nullptr;
}

std::vector<std::string_view> field_names() {
  std::vector<std::string_view> names;
  for (const Field& field : fields()) names.push_back(field.name);
  return names;
}

void set_value(Config& config, const Field& field, const Json& value) {
  std::visit(
      [&](const auto member) {
        using T = std::remove_cvref_t<decltype(config.*member)>;
        bool fits = false;
        if constexpr (std::is_same_v<T, int64_t>)
          fits = value.is_number_integer() &&
                 !(value.is_number_unsigned() && value.get<uint64_t>() > INT64_MAX);
        else if constexpr (std::is_same_v<T, double>)
          fits = value.is_number();
        else if constexpr (std::is_same_v<T, bool>)
          fits = value.is_boolean();
        else if constexpr (std::is_same_v<T, std::string>)
          fits = value.is_string();
        else
          fits = value.is_array() && std::all_of(value.begin(), value.end(),
                                                 [](const Json& word) { return word.is_string(); });
        constexpr const char* kind = std::is_same_v<T, int64_t>       ? "an integer"
                                     : std::is_same_v<T, double>      ? "a number"
                                     : std::is_same_v<T, bool>        ? "true or false"
                                     : std::is_same_v<T, std::string> ? "text"
                                                                      : "a list of texts";
        MOXIE_CHECK(fits, "\"", field.name, "\" must be ", kind, ", got ", printable(value.dump()));
        config.*member = value.get<T>();
      },
      field.member);
  check_field(config, field);
}

Json read_fields(const std::string& path) {
  constexpr int kDeepest = 2;  // nesting: object, list of words
  const MappedFile file(path);
  return parse_json(path, file.bytes(), {.deepest = kDeepest});
}

}  // namespace

std::string Field::flag() const {
  std::string text = "--" + std::string(name);
  for (char& c : text)
    if (c == '_') c = '-';
  return text;
}

const std::vector<Field>& fields() {
  using C = Config;
  static const std::vector<Field> all = {
      {"vocab", Part::kModel, &C::vocab, "tokens there are: 256, the bytes, or more", 256, 1 << 20},
      {"dim", Part::kModel, &C::dim, "width of the residual stream", 1, 1 << 16},
      {"layers", Part::kModel, &C::layers, "blocks of attention and MLP", 1, 1024},
      {"heads", Part::kModel, &C::heads, "heads of queries", 1, 1024},
      {"kv_heads", Part::kModel, &C::kv_heads, "heads of keys and values", 1, 1024},
      {"head_dim", Part::kModel, &C::head_dim, "width of a head", 2, 1024},
      {"experts", Part::kModel, &C::experts, "experts of a layer; 0: every layer is dense", 0,
       1024},
      {"top_k", Part::kModel, &C::top_k, "experts that a token goes to", 1, 64},
      {"hidden_dim", Part::kModel, &C::hidden_dim, "hidden width of an expert", 1, 1 << 20},
      {"shared_hidden_dim", Part::kModel, &C::shared_hidden_dim,
       "hidden width of the expert that every token passes; 0: none", 0, 1 << 20},
      {"dense_layers", Part::kModel, &C::dense_layers, "first layers, with one MLP and no experts",
       0, 1024},
      {"dense_hidden_dim", Part::kModel, &C::dense_hidden_dim, "hidden width of a dense layer", 1,
       1 << 20},
      {"score",
       Part::kModel,
       &C::score,
       "what the router makes of its logits",
       0,
       0,
       {"softmax", "sigmoid"}},
      {"balance",
       Part::kModel,
       &C::balance,
       "how experts come to equal load: a bias of the choice, an auxiliary loss, or nothing",
       0,
       0,
       {"bias", "loss", "none"}},
      {"bias_rate", Part::kModel, &C::bias_rate, "step of that bias", 0, 1},
      {"loss_weight", Part::kModel, &C::loss_weight, "weight of the auxiliary loss", 0, 1e3},
      {"z_loss_weight", Part::kModel, &C::z_loss_weight, "weight of the router's z-loss", 0, 1e3},
      {"rope_theta", Part::kModel, &C::rope_theta, "base of the rotary positions", 1, 1e12},
      {"tied_head", Part::kModel, &C::tied_head, "the output head is the embedding"},
      {"data", Part::kData, &C::data,
       "text files or folders; default: the Python standard library's sources"},
      {"seq_len", Part::kData, &C::seq_len, "tokens of a window", 1, 1 << 24},
      {"held_out", Part::kData, &C::held_out, "share of the data kept for evaluation", 0.001, 0.5},
      {"steps", Part::kTraining, &C::steps, "optimizer steps", 1, kMany},
      {"batch", Part::kTraining, &C::batch, "windows of a micro-batch", 1, 1 << 20},
      {"accumulate", Part::kTraining, &C::accumulate, "micro-batches of a step", 1, 1 << 20},
      {"lr", Part::kTraining, &C::lr, "learning rate at the end of the warm-up", 0, 1e3},
      {"min_lr", Part::kTraining, &C::min_lr, "share of it that is left at the end", 0, 1},
      {"warmup", Part::kTraining, &C::warmup, "steps of linear warm-up; cosine decay follows", 0,
       kMany},
      {"beta1", Part::kTraining, &C::beta1, "AdamW's decay of the mean", 0, 0.9999999},
      {"beta2", Part::kTraining, &C::beta2, "AdamW's decay of the mean square", 0, 0.9999999},
      {"eps", Part::kTraining, &C::eps, "AdamW's epsilon", 1e-30, 1},
      {"weight_decay", Part::kTraining, &C::weight_decay, "AdamW's decay of matrices", 0, 1e3},
      {"clip", Part::kTraining, &C::clip, "largest norm of the gradient; 0: any", 0, 1e9},
      {"seed", Part::kTraining, &C::seed, "of the weights and the order of the data", 0, kMany},
      {"dtype",
       Part::kTraining,
       &C::dtype,
       "of compute; master weights are float32",
       0,
       0,
       {"bf16", "f32"}},
      {"recipe", Part::kTraining, &C::recipe,
       "NAME for experts and linears, or PART=NAME: experts, linears, a module's name, re:PATTERN"},
      {"kept_activations",
       Part::kTraining,
       &C::kept_activations,
       "what experts and MLPs keep for backward: h as it is, or in FP8",
       0,
       0,
       {"h", "h_fp8"}},
      {"init", Part::kTraining, &C::init, "safetensors file to take the first weights from"},
      {"on_nan",
       Part::kTraining,
       &C::on_nan,
       "what a loss that is not finite does",
       0,
       0,
       {"stop", "skip"}},
      {"out", Part::kRun, &C::out, "folder of the run; default: runs/PRESET-RECIPE-seedN"},
      {"device",
       Part::kRun,
       &C::device,
       "auto takes a GPU if there is one",
       0,
       0,
       {"auto", "cpu", "cuda"}},
      {"threads", Part::kRun, &C::threads, "CPU threads; 0: torch's choice", 0, 4096},
      {"eval_every", Part::kRun, &C::eval_every, "steps between evaluations; 0: only at the end", 0,
       kMany},
      {"eval_windows", Part::kRun, &C::eval_windows,
       "windows of an evaluation on the way; at most those that are held out", 1, kMany},
      {"final_eval_windows", Part::kRun, &C::final_eval_windows,
       "windows of the evaluation at the end; at most those that are held out", 1, kMany},
      {"save_every", Part::kRun, &C::save_every, "steps between checkpoints; 0: only at the end", 0,
       kMany},
      {"keep", Part::kRun, &C::keep, "checkpoints that are kept", 1, kMany},
      {"stats_every", Part::kRun, &C::stats_every,
       "steps between expert load and quantization error in the metrics; 0: never", 0, kMany},
      {"save_weights", Part::kRun, &C::save_weights,
       "safetensors file that the weights are written to at the end"},
      {"title", Part::kRun, &C::title, "name of the run in its progress line"},
  };
  return all;
}

void set_from_words(Config& config, const Field& field, const Words& words) {
  MOXIE_CHECK(std::holds_alternative<Words Config::*>(field.member) || words.size() == 1,
              field.flag(), " takes one value, got ", words.size());
  std::visit(
      [&](const auto member) {
        using T = std::remove_cvref_t<decltype(config.*member)>;
        if constexpr (std::is_same_v<T, bool>)
          config.*member = parse_bool(words[0], field);
        else if constexpr (std::is_same_v<T, std::string>)
          config.*member = words[0];
        else if constexpr (std::is_same_v<T, Words>)
          config.*member = words;
        else
          config.*member = parse_number<T>(words[0], field);
      },
      field.member);
  check_field(config, field);
}

void set_from_json(Config& config, const Json& json, std::string_view where) {
  MOXIE_CHECK(json.is_object(), where, " must be an object of fields, got ", json.type_name());
  for (const auto& [key, value] : json.items()) {
    if (key == "preset") continue;
    const Field* field = find_field(key);
    MOXIE_CHECK(field != nullptr, where, ": there is no field ", printable(Json(key).dump()),
                did_you_mean(key, field_names()));
    try {
      set_value(config, *field, value);
    } catch (const Error& error) {
      fail(where, ": ", error.what());
    }
  }
}

Config read_config(const std::string& path, const Config& base) {
  const Json json = read_fields(path);
  const std::string where = "'" + path + "'";
  Config config = base;
  if (json.is_object() && json.contains("preset")) {
    const Json& name = json["preset"];
    MOXIE_CHECK(name.is_string(), where, ": \"preset\" must be text, got ", printable(name.dump()));
    try {
      config = preset(name.get<std::string>());
    } catch (const Error& error) {
      fail(where, ": ", error.what());
    }
  }
  set_from_json(config, json, where);
  return config;
}

Config saved_config(const Json& json, std::string_view where) {
  MOXIE_CHECK(json.is_object() && json.contains("preset") && json["preset"].is_string(), where,
              " is no config that a run wrote: it has no \"preset\"");
  Config config;
  try {
    config = preset(json["preset"].get<std::string>());
  } catch (const Error& error) {
    fail(where, ": ", error.what());
  }
  set_from_json(config, json, where);
  // Configs from before this field existed: the final evaluation read as many windows as the
  // others.
  if (!json.contains("final_eval_windows")) config.final_eval_windows = config.eval_windows;
  return config;
}

Config read_saved_config(const std::string& path) {
  return saved_config(read_fields(path), "'" + path + "'");
}

void check(const Config& config) {
  for (const Field& field : fields()) check_field(config, field);
  MOXIE_CHECK(config.heads % config.kv_heads == 0, "--heads must be a multiple of --kv-heads, got ",
              config.heads, " and ", config.kv_heads);
  MOXIE_CHECK(config.head_dim % 2 == 0, "--head-dim must be even, as positions rotate pairs, got ",
              config.head_dim);
  MOXIE_CHECK(config.experts == 0 || config.top_k <= config.experts,
              "--top-k must be at most --experts, got ", config.top_k, " and ", config.experts);
  MOXIE_CHECK(config.dense_layers <= config.layers, "--dense-layers must be at most --layers, got ",
              config.dense_layers, " and ", config.layers);
  MOXIE_CHECK(!config.recipe.empty(), "--recipe must name a recipe; bf16 quantizes nothing");
}

Json to_json(const Config& config) {
  Json json = {{"preset", config.preset}};
  for (const Field& field : fields())
    std::visit([&](const auto member) { json[std::string(field.name)] = config.*member; },
               field.member);
  return json;
}

}  // namespace moxie::cli
