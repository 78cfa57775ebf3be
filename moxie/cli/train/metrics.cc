#include "moxie/cli/train/metrics.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <functional>

#include "moxie/cli/file/atomic_file.h"
#include "moxie/cli/file/error.h"
#include "moxie/cli/file/json.h"
#include "moxie/cli/file/mapped_file.h"

namespace moxie::cli {
namespace {

using Json = nlohmann::json;

constexpr int kDeepest = 2;  // nesting: object, list of numbers

// A line of metrics.jsonl that may be a run's own: an object with a step.
struct Line {
  Json json;
  int64_t step = 0;
  std::string event = {};
  bool is_final() const { return json.value("final", Json(false)) == Json(true); }
};

std::optional<Line> line_of(std::string_view text) {
  std::optional<Json> json = try_parse_json(text, {.deepest = kDeepest});
  if (!json || !json->is_object() || !json->contains("step") ||
      !(*json)["step"].is_number_integer())
    return std::nullopt;
  Line line{.json = std::move(*json)};
  line.step = line.json["step"].get<int64_t>();
  const auto event = line.json.find("event");
  if (event != line.json.end() && event->is_string()) line.event = event->get<std::string>();
  return line;
}

// Calls f(bytes, line) for every line. bytes include the line end; `line` is empty if no run writes
// such a line. A last line without a line end was cut off by a kill, and is skipped.
void for_each_line(const std::string& path,
                   const std::function<void(std::string_view, const std::optional<Line>&)>& f) {
  if (!std::filesystem::exists(path)) return;
  const MappedFile file(path);
  std::string_view rest = file.bytes();
  for (size_t end; (end = rest.find('\n')) != rest.npos; rest.remove_prefix(end + 1))
    f(rest.substr(0, end + 1), line_of(rest.substr(0, end)));
}

bool is_kept(const std::optional<Line>& line, int64_t step) {
  return line && line->step <= step && !line->is_final();
}

std::string text_of(const Json& line, const char* name) {
  const auto found = line.find(name);
  return found != line.end() && found->is_string() ? found->get<std::string>() : std::string();
}

}  // namespace

std::string checksum_of(std::string_view text) {
  Checksum sum;
  sum.add(text);
  return sum.hex();
}

Metrics::Metrics(const std::string& path, int64_t step) : path_(path) {
  constexpr size_t kBuffer = 1 << 20;
  AtomicFile file(path);
  std::string kept;
  const auto flush = [&] {
    file.write(kept);
    sum_.add(kept);
    kept.clear();
  };
  for_each_line(path, [&](std::string_view bytes, const std::optional<Line>& line) {
    if (is_kept(line, step)) kept += bytes;
    if (kept.size() >= kBuffer) flush();
  });
  flush();
  file.commit();
  fd_ = ::open(path.c_str(), O_WRONLY | O_APPEND | O_CLOEXEC | O_NOFOLLOW);
  if (fd_ < 0) fail_io("cannot write", path, errno);
}

Metrics::~Metrics() { ::close(fd_); }

void Metrics::write(const nlohmann::ordered_json& line) {
  const std::string text = line.dump() + "\n";  // in one write(), so that a kill does not cut it
  const ssize_t written = ::write(fd_, text.data(), text.size());
  if (written < 0) fail_io("cannot write", path_, errno);
  if (static_cast<size_t>(written) != text.size()) fail_io("cannot write", path_, ENOSPC);
  sum_.add(text);
}

void Metrics::note_checkpoint(int64_t step, const std::string& checksum) {
  write({{"event", "checkpoint"}, {"step", step}, {"checksum", checksum}});
  if (::fsync(fd_) != 0) fail_io("cannot write", path_, errno);
}

void Metrics::note_result(int64_t step, std::string_view text) {
  write({{"event", "result"}, {"step", step}, {"checksum", checksum_of(text)}, {"final", true}});
  if (::fsync(fd_) != 0) fail_io("cannot write", path_, errno);
}

Ledger read_ledger(const std::string& path, int64_t step) {
  Ledger ledger;
  ledger.exists = std::filesystem::exists(path);
  Checksum before;
  for_each_line(path, [&](std::string_view bytes, const std::optional<Line>& line) {
    if (!line) {
      ++ledger.strange;
    } else if (line->is_final() && line->event == "eval" && !ledger.last) {
      ledger.last = Ledger::Last{.step = line->step,
                                 .loss = line->json.value("loss", Json()),
                                 .windows = line->json.value("windows", Json())};
    } else if (line->is_final() && line->event == "result" && ledger.result_step < 0) {
      ledger.result_step = line->step;
      ledger.result = text_of(line->json, "checksum");
    } else if (line->is_final()) {
      ++ledger.strange;
    } else if (line->step > step) {
      ++ledger.later;
    } else if (line->event == "checkpoint" && line->step == step && ledger.checkpoint.empty()) {
      ledger.checkpoint = text_of(line->json, "checksum");
    } else {
      before.add(bytes);
    }
  });
  ledger.before = before.hex();
  return ledger;
}

}  // namespace moxie::cli
