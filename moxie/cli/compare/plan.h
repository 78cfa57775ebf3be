// What a comparison trains: each recipe from each seed, all else equal.
#pragma once

#include <string>
#include <vector>

#include "moxie/cli/train/config.h"

namespace moxie::cli {

struct Plan {
  Config config;  // of every run, but for the fields that are each run's own
  Words recipes;  // the first is what the others are compared with
  int64_t seeds = 0;
};

// Fields that each run has for itself: recipe, seed, out and so on.
bool is_own_field(std::string_view name);

struct PlannedRun {
  std::string recipe;  // as the user wrote it
  int64_t seed = 0;
  std::string name;    // "bf16 seed 1"
  std::string folder;  // "bf16-seed1", in the folder of the comparison
  Config config;
};

// Seed by seed, so that what can be compared is there early. Error where the plan makes no sense.
std::vector<PlannedRun> runs_of(const Plan& plan);

nlohmann::ordered_json to_json(const Plan& plan);
Plan read_plan(const std::string& path);

// What the folder of a comparison holds beside a folder for each run.
struct CompareFolder {
  std::string path;
  std::string plan() const { return path + "/plan.json"; }
  std::string result() const { return path + "/compare.json"; }
  std::string report() const { return path + "/report.html"; }
  std::string lock() const { return path + "/lock"; }
  std::string of(const PlannedRun& run) const { return path + "/" + run.folder; }
};

}  // namespace moxie::cli
