// Shows the progress of long work on stderr: one changing line on a terminal, plain lines
// elsewhere.
#pragma once

#include <chrono>
#include <string>

namespace moxie::cli {

class Progress {
 public:
  // `done` of `total` steps, or of another unit, are behind us already.
  Progress(std::string title, int64_t done, int64_t total, std::string unit = "step");
  ~Progress();

  // what: "loss 2.345  12.3k tokens/s"
  void show(int64_t done, const std::string& what);
  // Prints a separate line, which stays.
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
