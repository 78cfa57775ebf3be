// Compares finished runs of several recipes by loss, difference to the first recipe's loss, speed
// and memory.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "moxie/cli/compare/plan.h"
#include "moxie/cli/compare/statistics.h"
#include "moxie/cli/train/result.h"

namespace moxie::cli {

struct ComparedRun {
  PlannedRun run;
  Result result;
  double difference = 0;  // to the base's run with the same seed, in % of the base's loss
};

struct ComparedRecipe {
  std::string recipe;
  std::vector<ComparedRun> runs;  // by seed
  // Means over the seeds, but the maximum for memory.
  double eval_loss = 0, difference = 0, tokens_per_s = 0;
  int64_t peak_memory_bytes = 0;
  std::optional<Interval> interval;  // of the difference
};

struct Comparison {
  Plan plan;
  std::vector<ComparedRecipe> recipes;  // the first is the base
  double bigram_entropy = 0;
  std::string device;
  bool on_cpu() const { return device.starts_with("cpu"); }
};

// runs: all runs of the plan with their results, in any order.
Comparison compare(const Plan& plan, const std::vector<ComparedRun>& runs);

// The comparison as printed: a table and the lines below it.
std::string text_of(const Comparison& comparison);
nlohmann::ordered_json to_json(const Comparison& comparison);

// One line of text for each recipe whose loss may be more than `percent` above the base's: the
// upper end of its confidence interval decides, and with one seed there is no interval, so every
// recipe gets a line.
Words recipes_above(const Comparison& comparison, double percent);
// One line of text for each recipe (the base included) whose loss is not below the bigram entropy.
Words recipes_not_learned(const Comparison& comparison);

}  // namespace moxie::cli
