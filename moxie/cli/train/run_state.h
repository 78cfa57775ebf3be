// Reads the state of a run from its folder, and trusts its files only as far as they agree. Each
// file is compared with another that the run wrote at the same time: config.json with the config
// inside the newest checkpoint, the checkpoint with its checksum in the metrics, the metrics with
// their checksum in the checkpoint, result.json with the metrics. This detects damage, and edits of
// a single file, but not a consistent edit of all of them.
#pragma once

#include <optional>

#include "moxie/cli/train/metrics.h"
#include "moxie/cli/train/result.h"
#include "moxie/cli/train/run_folder.h"
#include "moxie/cli/train/saved.h"

namespace moxie::cli {

struct RunState {
  Config config = {};                     // from config.json
  std::optional<Checkpoint> newest = {};  // absent before the first checkpoint
  Ledger ledger = {};
  Words notes = {};  // for the user: what is unchecked, or differs without effect on the weights
};

// Reads a run's state; the caller must hold the lock. Throws Error if there is no run, a file
// cannot be read, or two files contradict each other in a way that affects results.
RunState read_run(const RunFolder& folder);

// The result of the run, if it has done exactly `steps` steps and the final evaluation; else
// absent. Throws Error if it has done more steps, or if result.json is not what the run wrote;
// notes what cannot be checked.
std::optional<Result> finished_result(const RunFolder& folder, int64_t steps, RunState& state);

// A field's value as JSON, for messages.
std::string value_text(const Config& config, const Field& field);

}  // namespace moxie::cli
