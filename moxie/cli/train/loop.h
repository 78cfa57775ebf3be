// The training loop.
#pragma once

#include <stdexcept>
#include <string>

#include "moxie/cli/file/lock.h"
#include "moxie/cli/train/run_state.h"

namespace moxie::cli {

// Thrown after a signal (InterruptSignals); the progress is saved in a checkpoint.
class Interrupted : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Thrown if the loss is not finite and the config says to stop.
class NotFinite : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

struct TrainArgs {
  Config config;           // config.out is the run's folder
  const FolderLock& lock;  // of that folder
  RunState before = {};    // the folder's content; the run resumes from its newest checkpoint
  std::optional<Result> finished = {};  // if all steps are done: only weights are left to write
  std::string save_weights = {};        // file for the weights at the end; empty: none
};
// If the run is finished already, says so and returns its result.
Result train(TrainArgs args);

}  // namespace moxie::cli
