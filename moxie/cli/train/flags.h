// The fields of a Config as command-line flags.
#pragma once

#include <map>
#include <string>

#include "moxie/cli/command.h"
#include "moxie/cli/train/config.h"

namespace moxie::cli {

// The user's settings: a preset, then a file, then flags; later ones override earlier ones.
struct ConfigFlags {
  std::string preset, file;                 // empty: not given
  std::map<std::string_view, Words> given;  // by the field's name

  bool has(std::string_view name) const;
  Config config() const;
  Config resumed(const Config& saved) const;  // file and flags over what a run began with
  void apply(Config& config) const;           // the flags alone
};

// Adds the flags, grouped by part. `flags` must live as long as the app.
void add_config_flags(CLI::App& app, ConfigFlags& flags);

std::string default_run_folder(const Config& config);

}  // namespace moxie::cli
