#include "moxie/cli/terminal.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>

#include "moxie/cli/text.h"

namespace moxie::cli {
namespace {

constexpr int kBarWidth = 20;
constexpr std::chrono::milliseconds kTerminalPause{100};
constexpr std::chrono::seconds kLinePause{5};  // between two lines in a log file

size_t terminal_width() {
  winsize size = {};
  return ::ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : 80;
}

}  // namespace

Progress::Progress(std::string title, int64_t done, int64_t total, std::string unit)
    : title_(std::move(title)),
      unit_(std::move(unit)),
      first_(done),
      total_(total),
      terminal_(::isatty(STDERR_FILENO) != 0) {}

Progress::~Progress() {
  if (terminal_ && !last_.empty()) std::fputc('\n', stderr);
}

std::string Progress::bar(int64_t done) const {
  const int64_t total = std::max<int64_t>(total_, 1);
  const auto filled = static_cast<size_t>(kBarWidth * std::clamp<int64_t>(done, 0, total) / total);
  return "[" + std::string(filled, '=') + std::string(kBarWidth - filled, ' ') + "]";
}

void Progress::show(int64_t done, const std::string& what) {
  const auto now = Clock::now();
  const bool last = done == total_;
  if (!last && now - shown_ < (terminal_ ? Clock::duration(kTerminalPause) : kLinePause)) return;
  shown_ = now;
  const double elapsed = std::chrono::duration<double>(now - start_).count();
  std::string line = title_ + "  " + (terminal_ ? bar(done) + " " : "") + unit_ + " " +
                     std::to_string(done) + "/" + std::to_string(total_);
  if (!what.empty()) line += "  " + what;
  if (last)
    line += "  " + human_time(elapsed);
  else if (done > first_)
    line += "  ETA " + human_time(elapsed / static_cast<double>(done - first_) *
                                  static_cast<double>(total_ - done));
  line = plain(line);
  if (terminal_) {
    line.resize(std::min(line.size(), terminal_width() - 1));
    std::fprintf(stderr, "\r%s\x1b[K", line.c_str());
  } else {
    std::fprintf(stderr, "%s\n", line.c_str());
  }
  std::fflush(stderr);
  last_ = line;
}

void Progress::note(const std::string& line) {
  const std::string shown = plain(line);
  if (terminal_)
    std::fprintf(stderr, "\r%s\x1b[K\n%s", shown.c_str(), last_.c_str());
  else
    std::fprintf(stderr, "%s\n", shown.c_str());
  std::fflush(stderr);
}

}  // namespace moxie::cli
