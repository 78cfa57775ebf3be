// Starts other programs without a shell, so that no character in a name or argument has a special
// meaning.
#pragma once

#include <sys/types.h>

#include <csignal>
#include <string>
#include <vector>

namespace moxie::cli {

// The exit code that a shell reports if there is no such program.
inline constexpr int kNoProgram = 127;

// The child's process group: this program's, which the terminal's signals reach, or one of its own,
// which can be killed together with the processes that the child starts.
enum class Group { kOurs, kOwn };

struct SpawnArgs {
  static constexpr int kNowhere = -1;
  std::string program;  // searched for on PATH unless it contains a slash
  std::vector<std::string> args;
  int out = kNowhere, err = kNowhere;  // descriptors that become the child's stdout and stderr
  Group group = Group::kOurs;
  sigset_t signals;  // signals that are blocked when the child starts
};

// Starts a program and returns its process id; throws IoError if no process can be created. If
// there is no such program, the child exits with kNoProgram. Its stdin is empty. It gets SIGTERM if
// the thread that called spawn() ends first.
pid_t spawn(const SpawnArgs& args);

// The exit code for a status from waitpid(), as in a shell: 128 + N if signal N ended the child.
int exit_code(int status);

}  // namespace moxie::cli
