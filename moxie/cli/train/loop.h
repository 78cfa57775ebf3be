// The training loop.
#pragma once

#include <stdexcept>
#include <string>

#include "moxie/cli/train/run_state.h"

namespace moxie::cli {

// By a signal of InterruptSignals: what was trained is in a checkpoint.
class Interrupted : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// The loss was not finite, and the config says to stop.
class NotFinite : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

struct TrainArgs {
  Config config;         // config.out is the run's folder, of which the caller holds the lock
  RunState before = {};  // what is in the folder; its newest checkpoint is where the run goes on
  std::optional<Result> finished = {};  // of all of config.steps: only weights are left to write
  std::string save_weights = {};        // file to write them to at the end; empty: none
};
// Of a run that is finished it says so, and returns its result.
Result train(TrainArgs args);

}  // namespace moxie::cli
