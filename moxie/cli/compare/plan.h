// The plan of a comparison: each recipe is trained from each seed, all else equal.
#pragma once

#include <string>
#include <vector>

#include "moxie/cli/train/config.h"

namespace moxie::cli {

struct Plan {
  Config config;  // shared by all runs, except for the fields of is_own_field()
  Words recipes;  // the first is the base of the comparison
  int64_t seeds = 0;
};

// Whether each run has its own value of a field: recipe, seed, out and so on.
bool is_own_field(std::string_view name);

struct PlannedRun {
  std::string recipe;  // as the user wrote it
  int64_t seed = 0;
  std::string name;    // "bf16 seed 1"
  std::string folder;  // "bf16-seed1", in the folder of the comparison
  Config config;
};

// The runs, seed by seed, so that a first comparison is possible early. Throws Error if the plan is
// invalid.
std::vector<PlannedRun> runs_of(const Plan& plan);

nlohmann::ordered_json to_json(const Plan& plan);
Plan read_plan(const std::string& path);

// The files in a comparison's folder, besides one folder per run.
struct CompareFolder {
  std::string path;
  std::string plan() const { return path + "/plan.json"; }
  std::string result() const { return path + "/compare.json"; }
  std::string report() const { return path + "/report.html"; }
  std::string lock() const { return path + "/lock"; }
  std::string of(const PlannedRun& run) const { return path + "/" + run.folder; }
};

}  // namespace moxie::cli
