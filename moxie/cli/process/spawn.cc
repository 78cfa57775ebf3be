#include "moxie/cli/process/spawn.h"

#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>

#include "moxie/cli/file/error.h"

namespace moxie::cli {
namespace {

// Turns the forked child into the other program. It may only make system calls, because after
// fork() another thread's locks may be held forever.
[[noreturn]] void become(const SpawnArgs& args, char* const* words, pid_t parent) {
  ::prctl(PR_SET_PDEATHSIG, SIGTERM);
  if (::getppid() != parent) ::_exit(128 + SIGTERM);
  if (args.group == Group::kOwn) ::setpgid(0, 0);
  const int nothing = ::open("/dev/null", O_RDWR | O_CLOEXEC);
  ::dup2(nothing, STDIN_FILENO);
  ::dup2(args.out == SpawnArgs::kNowhere ? nothing : args.out, STDOUT_FILENO);
  ::dup2(args.err == SpawnArgs::kNowhere ? nothing : args.err, STDERR_FILENO);
  ::signal(SIGPIPE, SIG_DFL);  // this program ignores it, and exec keeps that
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
