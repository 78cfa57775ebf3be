// Starts other programs without a shell, so that no character in a name or argument is special.
#pragma once

#include <sys/types.h>

#include <csignal>
#include <string>
#include <vector>

namespace moxie::cli {

// The exit code of a shell if there is no such program.
inline constexpr int kNoProgram = 127;

// The child's process group. A terminal's signals go to a whole group; a child with its own group
// can be killed together with the processes it started.
enum class Group { kOurs, kOwn };

struct SpawnArgs {
  static constexpr int kNowhere = -1;
  std::string program;  // searched on PATH, unless it contains a slash
  std::vector<std::string> args;
  int out = kNowhere, err = kNowhere;  // descriptors that become the child's stdout and stderr
  Group group = Group::kOurs;
  sigset_t signals;  // the child starts with these blocked
};

// Returns the child's process id; throws IoError if no process can be created. If there is no such
// program, the child exits with kNoProgram. Its stdin is empty. It gets SIGTERM if the calling
// thread ends first.
pid_t spawn(const SpawnArgs& args);

// The exit code of waitpid()'s status, as in a shell: 128 + N if signal N ended the child.
int exit_code(int status);

}  // namespace moxie::cli
