// The command-line flags for the fields of a Config.
#pragma once

#include <map>
#include <string>

#include "moxie/cli/command.h"
#include "moxie/cli/train/config.h"

namespace moxie::cli {

// The user's settings: a preset, then a file, then flags; later ones override earlier ones.
struct ConfigFlags {
  std::string preset, file;                 // empty: not given
  std::map<std::string_view, Words> given;  // the words given for each field, by its name

  bool has(std::string_view name) const;
  Config config() const;
  Config resumed(const Config& saved) const;  // saved, overridden by file and flags
  void apply(Config& config) const;           // sets the fields given as flags
};

// Adds a flag for every field to the command, grouped by part. `flags` must live as long as the
// app.
void add_config_flags(CLI::App& app, ConfigFlags& flags);

std::string default_run_folder(const Config& config);

}  // namespace moxie::cli
