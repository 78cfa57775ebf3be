// The training loop.
#pragma once

#include <stdexcept>
#include <string>

#include "moxie/cli/train/config.h"

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

struct Result {
  int64_t steps = 0;
  int64_t parameters = 0;
  double eval_loss = 0;       // nats per token, of the held-out text
  double bigram_entropy = 0;  // of the same text
  double tokens_per_s = 0;
  double seconds = 0;  // of the steps
  int64_t peak_memory_bytes = 0;
  std::string device;
};

nlohmann::ordered_json to_json(const Result& result);

// What the run folder holds: config.json, metrics.jsonl, checkpoints/, result.json at the end, and
// a lock while a process trains in it.
struct RunFolder {
  std::string path;
  std::string config() const { return path + "/config.json"; }
  std::string metrics() const { return path + "/metrics.jsonl"; }
  std::string checkpoints() const { return path + "/checkpoints"; }
  std::string result() const { return path + "/result.json"; }
  std::string lock() const { return path + "/lock"; }
};

enum class Start : uint8_t {
  kFresh,   // Error if the folder holds a run already
  kResume,  // from the newest checkpoint; from the start if there is none yet
};

// config.out is the run folder.
Result train(Config config, Start start);

}  // namespace moxie::cli
