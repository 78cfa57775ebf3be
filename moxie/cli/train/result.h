// result.json, the result of a finished run.
#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <string>

namespace moxie::cli {

struct Result {
  int64_t steps = 0;
  int64_t parameters = 0;
  double eval_loss = 0;               // nats per token, of the held-out text
  int64_t eval_windows = 0;           // windows that were read for it; 0 in old files
  double bigram_entropy = 0;          // of the same text
  std::string data_fingerprint = {};  // of all text, see Corpus; empty in old files
  double tokens_per_s = 0;
  double seconds = 0;  // of the steps
  int64_t peak_memory_bytes = 0;
  std::string device = {};
};

nlohmann::ordered_json to_json(const Result& result);

// Throws Error, with the path, if the file is damaged.
Result read_result(const std::string& path);
// The result of a run that has done all of these steps and its evaluation; absent if it has not.
std::optional<Result> finished_result(const std::string& path, int64_t steps);

}  // namespace moxie::cli
