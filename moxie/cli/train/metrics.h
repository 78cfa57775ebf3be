// metrics.jsonl of a run: a line of JSON per event, each with its step.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

namespace moxie::cli {

class Metrics {
 public:
  // Goes on with the file that is there, without the lines of later steps than `step` and without
  // the final evaluation: they will come again.
  Metrics(const std::string& path, int64_t step);
  Metrics(const Metrics&) = delete;
  Metrics& operator=(const Metrics&) = delete;
  ~Metrics();

  void write(const nlohmann::ordered_json& line);  // IoError where the disk is full

 private:
  std::string path_;
  int fd_ = -1;
};

}  // namespace moxie::cli
