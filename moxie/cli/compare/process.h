// Other programs, run to their end in the foreground.
#pragma once

#include <csignal>
#include <string>

#include "moxie/cli/train/config.h"

namespace moxie::cli {

// While it lives, SIGINT and SIGTERM do not end this program: they reach the child that runs, which
// may have work to save.
class Children {
 public:
  Children();
  ~Children();
  Children(const Children&) = delete;
  Children& operator=(const Children&) = delete;

  // The exit code, as a shell has it: 128 + N where signal N ended the child, 127 where there is no
  // such program (looked for on PATH, unless it has a slash). The child has our stderr, an empty
  // stdin, and a stdout that nobody reads. If we are killed it gets SIGTERM.
  int run(const std::string& program, const Words& args);

  // Whether there was a signal so far, to us or from us.
  bool interrupted();

 private:
  sigset_t signals_, before_;
  bool interrupted_ = false;
};

}  // namespace moxie::cli
