#include "moxie/cli/train/flags.h"

#include <cctype>

#include "moxie/cli/text.h"
#include "moxie/core/base/check.h"

namespace moxie::cli {
namespace {

const char* heading(Part part) {
  switch (part) {
    case Part::kModel: return "The model";
    case Part::kData: return "The data";
    case Part::kTraining: return "The training";
    case Part::kRun: break;
  }
  return "The run";
}

// The default for the help, which is that of the tiny preset.
std::string default_text(const Field& field) {
  const Config config;
  return std::visit(
      [&](const auto member) -> std::string {
        using T = std::remove_cvref_t<decltype(config.*member)>;
        if constexpr (std::is_same_v<T, bool>)
          return config.*member ? "true" : "false";
        else if constexpr (std::is_same_v<T, std::string>)
          return config.*member;
        else if constexpr (std::is_same_v<T, Words>)
          return join(config.*member, " ");
        else
          return short_number(static_cast<double>(config.*member));
      },
      field.member);
}

std::string help_of(const Field& field) {
  std::string text(field.help);
  if (!field.choices.empty()) text += " (" + join(field.choices, ", ") + ")";
  const std::string value = default_text(field);
  return value.empty() ? text : text + " [" + value + "]";
}

}  // namespace

bool ConfigFlags::has(std::string_view name) const {
  const auto found = given.find(name);
  return found != given.end() && !found->second.empty();
}

void ConfigFlags::apply(Config& config) const {
  for (const Field& field : fields())
    if (has(field.name)) set_from_words(config, field, given.at(field.name));
}

Config ConfigFlags::config() const {
  Config config = preset.empty() ? Config() : cli::preset(preset);
  if (!file.empty()) config = read_config(file, config);
  apply(config);
  return config;
}

Config ConfigFlags::resumed(const Config& saved) const {
  MOXIE_CHECK(preset.empty() || preset == saved.preset, "--resume: --preset must be ", saved.preset,
              ", what the run began with, got ", preset);
  Config config = file.empty() ? saved : read_config(file, saved);
  apply(config);
  return config;
}

void add_config_flags(CLI::App& app, ConfigFlags& flags) {
  std::string known;
  for (const Preset& preset : presets())
    known += "\n" + std::string(preset.name) + ": " + std::string(preset.what);
  app.add_option("--preset", flags.preset, "what everything below starts from [tiny]" + known)
      ->type_name("NAME");
  app.add_option("--config", flags.file,
                 "JSON file of fields, over the preset; a run's config.json")
      ->type_name("FILE");
  for (const Field& field : fields()) {
    CLI::Option* option = app.add_option(field.flag(), flags.given[field.name], help_of(field));
    const bool list = std::holds_alternative<Words Config::*>(field.member);
    const bool number = std::holds_alternative<int64_t Config::*>(field.member) ||
                        std::holds_alternative<double Config::*>(field.member);
    option->group(heading(field.part))->type_name(number ? "NUMBER" : "WORD");
    option->type_size(1)->expected(1, list ? CLI::detail::expected_max_vector_size : 1);
  }
}

std::string default_run_folder(const Config& config) {
  std::string name =
      config.preset + "-" + join(config.recipe, "-") + "-seed" + std::to_string(config.seed);
  for (char& c : name)
    if (std::isalnum(static_cast<unsigned char>(c)) == 0 && c != '_' && c != '.') c = '-';
  return "runs/" + name;
}

}  // namespace moxie::cli
