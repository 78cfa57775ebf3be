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
constexpr int kNap = 5;  // ms between two looks at whether the child has ended

class Descriptor {
 public:
  explicit Descriptor(int number) : number_(number) {}
  ~Descriptor() { close(); }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;

  int number() const { return number_; }  // below 0 once closed: poll() passes that over
  void close() {
    if (number_ >= 0) ::close(number_);
    number_ = -1;
  }

 private:
  int number_;
};

// What is there now, up to twice what a pipe holds: whoever prints without end must not keep us
// here. Closed at the end of the stream. What is over kMostText is dropped, so that the child does
// not wait.
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

  // The end of the child ends the wait, not that of the stream: what the child has started may
  // still hold it.
  Output output;
  int status = 0;
  while (::waitpid(pid, &status, WNOHANG) == 0) {
    if (Clock::now() >= deadline) {
      ::kill(-pid, SIGKILL);
      ::kill(pid, SIGKILL);  // where it has not come to lead a group yet
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
