// metrics.jsonl of a run: a line of JSON per event, each with its step. It is the run's ledger too:
// it notes the checksum of every checkpoint and of the result, and a checkpoint notes the checksum
// of the lines before it. Whichever one of them is edited, another contradicts it.
#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "moxie/cli/file/checksum.h"

namespace moxie::cli {

class Metrics {
 public:
  // Goes on with the file that is there, without the lines of later steps than `step` and without
  // those of the end: they will come again.
  Metrics(const std::string& path, int64_t step);
  Metrics(const Metrics&) = delete;
  Metrics& operator=(const Metrics&) = delete;
  ~Metrics();

  void write(const nlohmann::ordered_json& line);  // IoError where the disk is full
  // Notes a checkpoint that is about to take its name; on the disk when this returns.
  void note_checkpoint(int64_t step, const std::string& checksum);
  // Notes the text of result.json, which is written next.
  void note_result(int64_t step, std::string_view text);

  std::string checksum() const { return sum_.hex(); }  // of all lines so far

 private:
  std::string path_;
  int fd_ = -1;
  Checksum sum_;
};

// What the metrics say about the other files.
struct Ledger {
  bool exists = false;
  std::string before = {};      // checksum of the lines that the checkpoint of `step` saw
  std::string checkpoint = {};  // that of the checkpoint of `step`; empty: not noted
  int64_t strange = 0;          // whole lines that no run writes
  int64_t later = 0;            // lines of later steps

  struct Last {
    int64_t step = 0;
    nlohmann::json loss = {}, windows = {};  // of the last evaluation
  };
  std::optional<Last> last = {};
  int64_t result_step = -1;
  std::string result = {};  // checksum of result.json; empty: not noted
};
Ledger read_ledger(const std::string& path, int64_t step);

std::string checksum_of(std::string_view text);

}  // namespace moxie::cli
