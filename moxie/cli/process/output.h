// What another program prints.
#pragma once

#include <chrono>
#include <string>
#include <vector>

namespace moxie::cli {

struct Output {
  enum class End { kExited, kTimedOut };
  End end = End::kExited;
  int code = 0;      // the exit code, as spawn.h has it; nothing where it timed out
  std::string text;  // its stdout, of which 64 KiB are kept
};

// Runs a program to its end. One that is still there after `timeout` is killed, with whatever it
// started. Its stderr goes nowhere.
Output read_output(const std::string& program, const std::vector<std::string>& args,
                   std::chrono::milliseconds timeout);

}  // namespace moxie::cli
