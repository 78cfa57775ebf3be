// What a finished run says: result.json.
#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <string>

namespace moxie::cli {

struct Result {
  int64_t steps = 0;
  int64_t parameters = 0;
  double eval_loss = 0;               // nats per token, of the held-out text
  int64_t eval_windows = 0;           // that were read for it; 0 of a run that did not say
  double bigram_entropy = 0;          // of the same text
  std::string data_fingerprint = {};  // of all text, see Corpus; empty of a run that did not say
  double tokens_per_s = 0;
  double seconds = 0;  // of the steps
  int64_t peak_memory_bytes = 0;
  std::string device = {};
};

nlohmann::ordered_json to_json(const Result& result);

// Error, with the path, where the file is damaged.
Result read_result(const std::string& path);
// Of a run that has taken all of these steps, and been evaluated; there may be none.
std::optional<Result> finished_result(const std::string& path, int64_t steps);

}  // namespace moxie::cli
