// Runs other programs to their end in the foreground.
#pragma once

#include <chrono>
#include <csignal>
#include <string>
#include <vector>

namespace moxie::cli {

inline constexpr int kTimedOut = 124;  // as timeout(1) exits

// RAII: SIGINT, SIGTERM, SIGHUP and SIGPIPE do not end this program, but are passed on to the
// running child, which may have work to save.
class Children {
 public:
  Children();
  ~Children();
  Children(const Children&) = delete;
  Children& operator=(const Children&) = delete;

  // Returns the exit code as a shell does: 128 + N if signal N ended the child, kNoProgram
  // (spawn.h) if there is no such program. A child that still runs after `timeout` is killed, and
  // kTimedOut is returned. The child inherits stderr; its stdout is discarded.
  int run(const std::string& program, const std::vector<std::string>& args,
          std::chrono::milliseconds timeout = std::chrono::milliseconds::max());

  // Whether a signal has been received or sent so far.
  bool interrupted();

 private:
  sigset_t signals_, before_;
  bool interrupted_ = false;
};

}  // namespace moxie::cli
