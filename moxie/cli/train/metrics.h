// metrics.jsonl of a run: one line of JSON per event, with its step. It also serves as the run's
// ledger: it records the checksum of every checkpoint and of the result, and each checkpoint
// records the checksum of the lines before it. If one of these files is edited, another one
// contradicts it.
#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "moxie/cli/file/checksum.h"

namespace moxie::cli {

class Metrics {
 public:
  // Opens the file to continue it: drops lines after `step`, and lines that end a run, which will
  // be written again.
  Metrics(const std::string& path, int64_t step);
  Metrics(const Metrics&) = delete;
  Metrics& operator=(const Metrics&) = delete;
  ~Metrics();

  void write(const nlohmann::ordered_json& line);  // throws IoError, e.g. if the disk is full
  // Records the checksum of a checkpoint, before its file gets its name. The line is on the disk
  // when this returns.
  void note_checkpoint(int64_t step, const std::string& checksum);
  // Records the checksum of `text`, which is about to be written to result.json.
  void note_result(int64_t step, std::string_view text);

  std::string checksum() const { return sum_.hex(); }  // over all lines so far

 private:
  std::string path_;
  int fd_ = -1;
  Checksum sum_;
};

// What metrics.jsonl records about the run's other files.
struct Ledger {
  bool exists = false;
  std::string before = {};      // checksum of the lines before the one for the checkpoint of `step`
  std::string checkpoint = {};  // checksum of the checkpoint of `step`; empty if not recorded
  int64_t strange = 0;          // number of complete lines that no run writes
  int64_t later = 0;            // number of lines with later steps

  struct Last {
    int64_t step = 0;
    nlohmann::json loss = {}, windows = {};  // of the final evaluation
  };
  std::optional<Last> last = {};
  int64_t result_step = -1;
  std::string result = {};  // checksum of result.json; empty if not recorded
};
Ledger read_ledger(const std::string& path, int64_t step);

std::string checksum_of(std::string_view text);

}  // namespace moxie::cli
