#include "moxie/cli/train/metrics.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>

#include "moxie/cli/file/atomic_file.h"
#include "moxie/cli/file/error.h"
#include "moxie/cli/file/mapped_file.h"

namespace moxie::cli {
namespace {

using Json = nlohmann::ordered_json;

bool is_final(const Json& line) { return line.value("final", Json(false)) == Json(true); }

// The lines up to `step`, but for a final evaluation; a last line that a kill cut short is none.
std::string lines_until(const std::string& path, int64_t step) {
  if (!std::filesystem::exists(path)) return "";
  const MappedFile file(path);
  std::string kept;
  std::string_view rest = file.bytes();
  for (size_t end; (end = rest.find('\n')) != rest.npos; rest.remove_prefix(end + 1)) {
    const Json line = Json::parse(rest.substr(0, end), nullptr, /*allow_exceptions=*/false);
    if (!line.is_object() || !line.contains("step") || !line["step"].is_number_integer()) continue;
    if (line["step"].get<int64_t>() > step || is_final(line)) continue;
    kept += rest.substr(0, end + 1);
  }
  return kept;
}

}  // namespace

Metrics::Metrics(const std::string& path, int64_t step) : path_(path) {
  write_file(path, lines_until(path, step));
  fd_ = ::open(path.c_str(), O_WRONLY | O_APPEND | O_CLOEXEC);
  if (fd_ < 0) fail_io("cannot write", path, errno);
}

Metrics::~Metrics() { ::close(fd_); }

void Metrics::write(const Json& line) {
  const std::string text = line.dump() + "\n";  // in one call: a kill leaves whole lines
  const ssize_t written = ::write(fd_, text.data(), text.size());
  if (written < 0) fail_io("cannot write", path_, errno);
  if (static_cast<size_t>(written) != text.size()) fail_io("cannot write", path_, ENOSPC);
}

}  // namespace moxie::cli
