// Shows the progress of long work on stderr: on a terminal as one line that changes, elsewhere as
// separate lines.
#pragma once

#include <chrono>
#include <string>

namespace moxie::cli {

class Progress {
 public:
  // done: how many of `total` steps, or of another unit, are done at the start.
  Progress(std::string title, int64_t done, int64_t total, std::string unit = "step");
  ~Progress();

  // what: what to show beside the count, say "loss 2.345  12.3k tokens/s".
  void show(int64_t done, const std::string& what);
  // Prints a line that stays, above the progress line.
  void note(const std::string& line);

 private:
  using Clock = std::chrono::steady_clock;
  std::string bar(int64_t done) const;
  std::string title_, unit_, last_;
  int64_t first_, total_;
  bool terminal_;
  Clock::time_point start_ = Clock::now(), shown_ = {};
};

}  // namespace moxie::cli
