// The training loop.
#pragma once

#include <stdexcept>
#include <string>
#include <vector>

#include "moxie/cli/train/config.h"
#include "moxie/cli/train/result.h"

namespace moxie::cli {

// Ctrl-C, or SIGTERM: a checkpoint has been written.
class Interrupted : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// The loss was not finite, and the config says to stop.
class NotFinite : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// What the run folder holds: config.json, metrics.jsonl, checkpoints/, result.json at the end, and
// a lock while a process trains in it.
struct RunFolder {
  std::string path;
  std::string config() const { return path + "/config.json"; }
  std::string metrics() const { return path + "/metrics.jsonl"; }
  std::string checkpoints() const { return path + "/checkpoints"; }
  std::string result() const { return path + "/result.json"; }
  std::string lock() const { return path + "/lock"; }
  std::vector<std::string> files() const { return {config(), metrics(), result(), lock()}; }
};

enum class Start : uint8_t {
  kFresh,   // Error if the folder holds a run already
  kResume,  // from the newest checkpoint; from the start if there is none yet
};

// config.out is the run folder. Of a run that is finished it says so, and returns its result.
Result train(Config config, Start start);

}  // namespace moxie::cli
