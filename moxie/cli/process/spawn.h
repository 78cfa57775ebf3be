// Starts other programs without a shell: no character of a name or of an argument means anything
// but itself.
#pragma once

#include <sys/types.h>

#include <csignal>
#include <string>
#include <vector>

namespace moxie::cli {

// The exit code of a child for which there is no program, as a shell has it.
inline constexpr int kNoProgram = 127;

// Signals of a terminal go to a whole group. A child of an own group can be killed with all that it
// started.
enum class Group { kOurs, kOwn };

struct SpawnArgs {
  static constexpr int kNowhere = -1;
  std::string program;  // looked for on PATH, unless it has a slash
  std::vector<std::string> args;
  int out = kNowhere, err = kNowhere;  // descriptors that become the child's stdout and stderr
  Group group = Group::kOurs;
  sigset_t signals;  // the child starts with these blocked
};

// The child's process id; IoError where no process can be made. Where there is no such program, the
// child ends with kNoProgram. Its stdin is empty. It gets SIGTERM if the calling thread ends first.
pid_t spawn(const SpawnArgs& args);

// Of waitpid()'s status, as a shell has it: 128 + N where signal N ended the child.
int exit_code(int status);

}  // namespace moxie::cli
