// The state of a run, read from its folder, trusted only as far as its files agree. Each file is
// compared with another that the run wrote at the same time: config.json with the config inside the
// newest checkpoint, the checkpoint with the checksum in the metrics, the metrics with the checksum
// in the checkpoint, result.json with the metrics. This detects damage and the edit of one file,
// but not a consistent edit of all of them.
#pragma once

#include <optional>

#include "moxie/cli/train/metrics.h"
#include "moxie/cli/train/result.h"
#include "moxie/cli/train/run_folder.h"
#include "moxie/cli/train/saved.h"

namespace moxie::cli {

struct RunState {
  Config config = {};                     // from config.json
  std::optional<Checkpoint> newest = {};  // absent before the first
  Ledger ledger = {};
  Words notes = {};  // for the user: differences that do not affect the weights, or are unchecked
};

// For the holder of the lock. Throws Error if there is no run, a file cannot be read, or two files
// contradict each other in fields that affect the results.
RunState read_run(const RunFolder& folder);

// The result of a run that has done all of these steps and its evaluation; absent if it has not.
// Throws Error if it has done more steps, or if result.json is not what the run wrote. Adds to the
// notes.
std::optional<Result> finished_result(const RunFolder& folder, int64_t steps, RunState& state);

// The value of a field as JSON, for messages.
std::string value_text(const Config& config, const Field& field);

}  // namespace moxie::cli
