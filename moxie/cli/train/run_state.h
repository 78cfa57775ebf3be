// What a folder says of the run in it, believed only as far as its files agree. Each is compared
// with another that a run wrote at the same time: config.json with the config inside the newest
// checkpoint, the checkpoint with the checksum that the metrics note, the metrics with the checksum
// that the checkpoint notes, result.json with the metrics. That finds damage and the edit of one
// file; whoever edits all of them alike is not found.
#pragma once

#include <optional>

#include "moxie/cli/train/metrics.h"
#include "moxie/cli/train/result.h"
#include "moxie/cli/train/run_folder.h"
#include "moxie/cli/train/saved.h"

namespace moxie::cli {

struct RunState {
  Config config = {};                     // of config.json
  std::optional<Checkpoint> newest = {};  // none before the first
  Ledger ledger = {};
  Words notes = {};  // for the user: what differs without changing the weights, or is unchecked
};

// For the holder of the lock. Error where there is no run, a file cannot be read, or two of them
// contradict each other in what gives the run its numbers.
RunState read_run(const RunFolder& folder);

// Of a run that has taken all of these steps and been evaluated; there may be none. Error where it
// has taken more, or where result.json is not what the run wrote. Adds to the notes.
std::optional<Result> finished_result(const RunFolder& folder, int64_t steps, RunState& state);

// The value of a field as JSON, for messages.
std::string value_text(const Config& config, const Field& field);

}  // namespace moxie::cli
