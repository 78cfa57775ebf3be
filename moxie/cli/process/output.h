// Reads the output of another program.
#pragma once

#include <chrono>
#include <string>
#include <vector>

namespace moxie::cli {

struct Output {
  enum class End { kExited, kTimedOut };
  End end = End::kExited;
  int code = 0;      // the exit code (spawn.h); meaningless if it timed out
  std::string text;  // the first 64 KiB of its stdout
};

// Runs a program to its end. After `timeout` it is killed, together with the processes it started.
// Its stderr is discarded.
Output read_output(const std::string& program, const std::vector<std::string>& args,
                   std::chrono::milliseconds timeout);

}  // namespace moxie::cli
