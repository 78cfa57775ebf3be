// Writes and reads result.json, the result of a finished run.
#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <string>

namespace moxie::cli {

struct Result {
  int64_t steps = 0;
  int64_t parameters = 0;
  double eval_loss = 0;               // on the held-out text, in nats per token
  int64_t eval_windows = 0;           // windows that the evaluation read; 0 in old files
  double bigram_entropy = 0;          // of the held-out text
  std::string data_fingerprint = {};  // of all text (Corpus::fingerprint); empty in old files
  double tokens_per_s = 0;
  double seconds = 0;  // that the steps took
  int64_t peak_memory_bytes = 0;
  std::string device = {};
};

nlohmann::ordered_json to_json(const Result& result);

// Reads a result.json; throws Error, with the path, if it is damaged.
Result read_result(const std::string& path);
// The result of the run, if it has done exactly `steps` steps and the final evaluation; else
// absent.
std::optional<Result> finished_result(const std::string& path, int64_t steps);

}  // namespace moxie::cli
