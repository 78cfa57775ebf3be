// Runs another program and reads its output.
#pragma once

#include <chrono>
#include <string>
#include <vector>

namespace moxie::cli {

struct Output {
  enum class End { kExited, kTimedOut };
  End end = End::kExited;
  int code = 0;      // as exit_code() in spawn.h; meaningless after a timeout
  std::string text;  // the first 64 KiB of its stdout
};

// Runs a program to its end, or kills it after `timeout`, together with the processes that it
// started. Its stderr is discarded.
Output read_output(const std::string& program, const std::vector<std::string>& args,
                   std::chrono::milliseconds timeout);

}  // namespace moxie::cli
