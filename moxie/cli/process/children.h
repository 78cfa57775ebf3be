// Other programs, run to their end in the foreground.
#pragma once

#include <csignal>
#include <string>
#include <vector>

namespace moxie::cli {

// While it lives, SIGINT, SIGTERM, SIGHUP and SIGPIPE do not end this program: they reach the child
// that runs, which may have work to save.
class Children {
 public:
  Children();
  ~Children();
  Children(const Children&) = delete;
  Children& operator=(const Children&) = delete;

  // The exit code, as a shell has it: 128 + N where signal N ended the child, kNoProgram (spawn.h)
  // where there is no such program. The child has our stderr and a stdout that nobody reads.
  int run(const std::string& program, const std::vector<std::string>& args);

  // Whether there was a signal so far, to us or from us.
  bool interrupted();

 private:
  sigset_t signals_, before_;
  bool interrupted_ = false;
};

}  // namespace moxie::cli
