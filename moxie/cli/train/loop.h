// Trains a model: the loop of `moxie train`.
#pragma once

#include <stdexcept>
#include <string>

#include "moxie/cli/file/lock.h"
#include "moxie/cli/train/run_state.h"

namespace moxie::cli {

// Thrown when a signal has ended the work (machine.h). Any progress is saved, and the message says
// how to go on.
class Interrupted : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Thrown if the loss is not finite and --on-nan is stop.
class NotFinite : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

struct TrainArgs {
  Config config;                        // config.out names the run's folder
  const FolderLock& lock;               // lock of the run's folder
  RunState before = {};                 // what the folder holds; its newest checkpoint is resumed
  std::optional<Result> finished = {};  // of a run whose steps are all done
  std::string save_weights = {};        // file to write the weights to at the end; empty: none
};
// Trains, or resumes. If the run is finished already, says so and returns its result.
Result train(TrainArgs args);

}  // namespace moxie::cli
