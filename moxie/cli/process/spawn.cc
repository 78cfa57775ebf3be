#include "moxie/cli/process/spawn.h"

#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>

#include "moxie/cli/file/error.h"

namespace moxie::cli {
namespace {

// Runs between fork and exec, so it may only make system calls.
[[noreturn]] void become(const SpawnArgs& args, char* const* words, pid_t parent) {
  ::prctl(PR_SET_PDEATHSIG, SIGTERM);
  if (::getppid() != parent) ::_exit(128 + SIGTERM);
  if (args.group == Group::kOwn) ::setpgid(0, 0);
  const int nothing = ::open("/dev/null", O_RDWR | O_CLOEXEC);
  ::dup2(nothing, STDIN_FILENO);
  ::dup2(args.out == SpawnArgs::kNowhere ? nothing : args.out, STDOUT_FILENO);
  ::dup2(args.err == SpawnArgs::kNowhere ? nothing : args.err, STDERR_FILENO);
  ::signal(SIGPIPE, SIG_DFL);  // we ignore it, which the child would inherit
  ::sigprocmask(SIG_SETMASK, &args.signals, nullptr);
  ::execvp(words[0], words);
  ::_exit(kNoProgram);
}

}  // namespace

pid_t spawn(const SpawnArgs& args) {
  std::vector<char*> words = {const_cast<char*>(args.program.c_str())};
  for (const std::string& arg : args.args) words.push_back(const_cast<char*>(arg.c_str()));
  words.push_back(nullptr);
  const pid_t parent = ::getpid(), child = ::fork();
  if (child < 0) fail_io("cannot start", args.program, errno);
  if (child == 0) become(args, words.data(), parent);
  return child;
}

int exit_code(int status) {
  return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
}

}  // namespace moxie::cli
