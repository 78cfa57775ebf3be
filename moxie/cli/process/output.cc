#include "moxie/cli/process/output.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>

#include "moxie/cli/file/error.h"
#include "moxie/cli/process/spawn.h"

namespace moxie::cli {
namespace {

constexpr size_t kMostText = 64 << 10;
constexpr int kNap = 5;  // milliseconds between two looks at whether the child has ended

class Descriptor {
 public:
  explicit Descriptor(int number) : number_(number) {}
  ~Descriptor() { close(); }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;

  int number() const { return number_; }  // negative once closed, which poll() ignores
  void close() {
    if (number_ >= 0) ::close(number_);
    number_ = -1;
  }

 private:
  int number_;
};

// Reads what is available, but at most twice the size of a pipe: a child that prints without end
// must not keep this loop busy past its timeout. Closes `from` at the end of the stream. Reads and
// drops text past kMostText, so that the child does not block.
void drain(Descriptor& from, std::string& text) {
  std::array<char, 4096> bytes;
  for (int i = 0; i < 32 && from.number() >= 0; ++i) {
    const ssize_t count = ::read(from.number(), bytes.data(), bytes.size());
    if (count < 0 && errno == EINTR) continue;
    if (count < 0 && errno == EAGAIN) return;
    if (count <= 0) return from.close();
    text.append(bytes.data(), std::min(static_cast<size_t>(count), kMostText - text.size()));
  }
}

}  // namespace

Output read_output(const std::string& program, const std::vector<std::string>& args,
                   std::chrono::milliseconds timeout) {
  using Clock = std::chrono::steady_clock;
  const Clock::time_point deadline = Clock::now() + timeout;
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) fail_io("cannot read from", program, errno);
  Descriptor from(ends[0]), to(ends[1]);
  ::fcntl(from.number(), F_SETFL, O_NONBLOCK);
  SpawnArgs child{
      .program = program, .args = args, .out = to.number(), .group = Group::kOwn, .signals = {}};
  ::sigprocmask(SIG_BLOCK, nullptr, &child.signals);
  const pid_t pid = spawn(child);
  to.close();

  // Waits until the child ends, not until its stream ends: processes that the child started may
  // keep the stream open.
  Output output;
  int status = 0;
  while (::waitpid(pid, &status, WNOHANG) == 0) {
    if (Clock::now() >= deadline) {
      ::kill(-pid, SIGKILL);
      ::kill(pid, SIGKILL);  // in case the child has not made its process group yet
      ::waitpid(pid, nullptr, 0);
      output.end = Output::End::kTimedOut;
      return output;
    }
    drain(from, output.text);
    pollfd waiting = {.fd = from.number(), .events = POLLIN, .revents = 0};
    ::poll(&waiting, 1, kNap);
  }
  drain(from, output.text);
  output.code = exit_code(status);
  return output;
}

}  // namespace moxie::cli
