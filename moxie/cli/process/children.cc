#include "moxie/cli/process/children.h"

#include <sys/wait.h>
#include <unistd.h>

#include <ctime>

#include "moxie/cli/process/spawn.h"

namespace moxie::cli {

Children::Children() {
  ::sigemptyset(&signals_);
  for (const int number : {SIGINT, SIGTERM, SIGHUP, SIGPIPE, SIGCHLD})
    ::sigaddset(&signals_, number);
  ::sigprocmask(SIG_BLOCK, &signals_, &before_);
}

Children::~Children() { ::sigprocmask(SIG_SETMASK, &before_, nullptr); }

bool Children::interrupted() {
  const timespec now = {};
  for (int number; (number = ::sigtimedwait(&signals_, nullptr, &now)) > 0;)
    interrupted_ |= number != SIGCHLD;
  return interrupted_;
}

int Children::run(const std::string& program, const std::vector<std::string>& args,
                  std::chrono::milliseconds timeout) {
  using Clock = std::chrono::steady_clock;
  const Clock::time_point start = Clock::now();
  const pid_t child =
      spawn({.program = program, .args = args, .err = STDERR_FILENO, .signals = before_});
  int status = 0;
  while (::waitpid(child, &status, WNOHANG) == 0) {
    // Compares in milliseconds: the longest timeout would overflow in nanoseconds.
    if (std::chrono::floor<std::chrono::milliseconds>(Clock::now() - start) >= timeout) {
      ::kill(child, SIGKILL);
      ::waitpid(child, &status, 0);
      return kTimedOut;
    }
    siginfo_t info = {};
    const timespec slice = {.tv_sec = 0, .tv_nsec = 50'000'000};  // how late a timeout may come
    const int number = ::sigtimedwait(&signals_, &info, &slice);
    if (number < 0 || number == SIGCHLD) continue;
    // A signal from the terminal (si_code > 0) has reached the child too. One from a process may
    // have been sent to this process alone or to its whole group: it is unknown which. So the child
    // gets a signal of another kind: if it has this one already, a second of the same kind would
    // end it at once.
    if (info.si_code <= 0 && !interrupted_) ::kill(child, number == SIGTERM ? SIGINT : SIGTERM);
    interrupted_ = true;
  }
  const int code = exit_code(status);
  interrupted_ |= code == 128 + SIGINT || code == 128 + SIGTERM;
  return code;
}

}  // namespace moxie::cli
