#include "moxie/cli/compare/process.h"

#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <ctime>
#include <vector>

#include "moxie/cli/file/error.h"

namespace moxie::cli {
namespace {

constexpr int kNoProgram = 127;

// Between fork and exec: system calls alone.
[[noreturn]] void become(const char* program, char* const* words, const sigset_t& signals,
                         pid_t parent) {
  ::prctl(PR_SET_PDEATHSIG, SIGTERM);
  if (::getppid() != parent) ::_exit(128 + SIGTERM);
  const int nothing = ::open("/dev/null", O_RDWR | O_CLOEXEC);
  ::dup2(nothing, STDIN_FILENO);
  ::dup2(nothing, STDOUT_FILENO);
  ::sigprocmask(SIG_SETMASK, &signals, nullptr);
  ::execvp(program, words);
  ::_exit(kNoProgram);
}

int exit_code(int status) {
  return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
}

}  // namespace

Children::Children() {
  ::sigemptyset(&signals_);
  for (const int number : {SIGINT, SIGTERM, SIGCHLD}) ::sigaddset(&signals_, number);
  ::sigprocmask(SIG_BLOCK, &signals_, &before_);
}

Children::~Children() { ::sigprocmask(SIG_SETMASK, &before_, nullptr); }

bool Children::interrupted() {
  const timespec now = {};
  for (int number; (number = ::sigtimedwait(&signals_, nullptr, &now)) > 0;)
    interrupted_ |= number != SIGCHLD;
  return interrupted_;
}

int Children::run(const std::string& program, const Words& args) {
  std::vector<char*> words = {const_cast<char*>(program.c_str())};
  for (const std::string& arg : args) words.push_back(const_cast<char*>(arg.c_str()));
  words.push_back(nullptr);
  const pid_t parent = ::getpid(), child = ::fork();
  if (child < 0) fail_io("cannot start", program, errno);
  if (child == 0) become(program.c_str(), words.data(), before_, parent);

  int status = 0;
  while (::waitpid(child, &status, WNOHANG) == 0) {
    siginfo_t info = {};
    const int number = ::sigwaitinfo(&signals_, &info);
    if (number != SIGINT && number != SIGTERM) continue;
    // A terminal has told the child too. Whoever told us alone, or all of our group, is not known:
    // the child gets the other of the two signals, as a second one of the same kind would end it
    // at once.
    if (info.si_code <= 0 && !interrupted_) ::kill(child, number == SIGINT ? SIGTERM : SIGINT);
    interrupted_ = true;
  }
  const int code = exit_code(status);
  interrupted_ |= code == 128 + SIGINT || code == 128 + SIGTERM;
  return code;
}

}  // namespace moxie::cli
