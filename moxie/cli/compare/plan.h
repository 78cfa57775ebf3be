// The plan of a comparison: each recipe is trained once from each seed, with everything else equal.
#pragma once

#include <string>
#include <vector>

#include "moxie/cli/train/config.h"

namespace moxie::cli {

struct Plan {
  Config config;  // shared by all runs, but for fields with is_own_field()
  Words recipes;  // the first is the base of the comparison
  int64_t seeds = 0;
};

// Whether each run sets this field itself: recipe, seed, out, title and save_weights.
bool is_own_field(std::string_view name);

struct PlannedRun {
  std::string recipe;  // as the user wrote it
  int64_t seed = 0;
  std::string name;    // "bf16 seed 1"
  std::string folder;  // "bf16-seed1", inside the comparison's folder
  Config config;
};

// All runs of the plan, ordered by seed, then recipe, so that all recipes can be compared as soon
// as the first seed is done. Throws Error if the plan is invalid.
std::vector<PlannedRun> runs_of(const Plan& plan);

nlohmann::ordered_json to_json(const Plan& plan);
Plan read_plan(const std::string& path);

// The files in a comparison's folder; each run also has a folder there.
struct CompareFolder {
  std::string path;
  std::string plan() const { return path + "/plan.json"; }
  std::string result() const { return path + "/compare.json"; }
  std::string report() const { return path + "/report.html"; }
  std::string lock() const { return path + "/lock"; }
  std::string of(const PlannedRun& run) const { return path + "/" + run.folder; }
};

}  // namespace moxie::cli
