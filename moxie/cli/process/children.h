// Runs child processes in the foreground and waits for their end.
#pragma once

#include <chrono>
#include <csignal>
#include <string>
#include <vector>

namespace moxie::cli {

inline constexpr int kTimedOut = 124;  // the exit code of timeout(1)

// While it lives, SIGINT, SIGTERM, SIGHUP and SIGPIPE do not end this program; they are passed on
// to the running child, which may have work to save.
class Children {
 public:
  Children();
  ~Children();
  Children(const Children&) = delete;
  Children& operator=(const Children&) = delete;

  // Runs a program to its end. Returns the exit code as a shell does: 128 + N if signal N ended the
  // child, kNoProgram (spawn.h) if there is no such program. A child that still runs after
  // `timeout` is killed, and kTimedOut is returned. The child inherits stderr; its stdout is
  // discarded.
  int run(const std::string& program, const std::vector<std::string>& args,
          std::chrono::milliseconds timeout = std::chrono::milliseconds::max());

  // Whether SIGINT, SIGTERM, SIGHUP or SIGPIPE has arrived so far, or a child was ended by SIGINT
  // or SIGTERM.
  bool interrupted();

 private:
  sigset_t signals_, before_;
  bool interrupted_ = false;
};

}  // namespace moxie::cli
