#include "moxie/cli/train/saved.h"

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <tuple>

#include "moxie/cli/file/error.h"
#include "moxie/cli/file/json.h"
#include "moxie/core/base/check.h"

namespace moxie::cli {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

constexpr std::string_view kPrefix = "step-", kSuffix = ".safetensors";
constexpr int64_t kTooMany = int64_t{1} << 62;  // limit of steps and windows, against overflow
constexpr int kDigits = 8;                      // names sort in order of steps, up to 10^8
constexpr int kDeepest = 3;                     // nesting: saved, config, list of words

Checkpoint read_checkpoint(const std::string& path) {
  Checkpoint checkpoint{.path = path};
  try {
    const Safetensors file = read_safetensors(path, Verify::kHeader);
    checkpoint.saved = saved_of(path, file);
    checkpoint.checksum = file.checksum;
  } catch (const Error& error) {
    checkpoint.problem = error.what();
  } catch (const IoError& error) {
    checkpoint.problem = error.what();
  }
  return checkpoint;
}

}  // namespace

std::string to_text(const Saved& saved) {
  const Json position = {{"step", saved.position.step},
                         {"window", saved.position.window},
                         {"data_fingerprint", saved.position.data_fingerprint},
                         {"seconds", saved.position.seconds}};
  return Json{{"config", to_json(saved.config)}, {"position", position}, {"metrics", saved.metrics}}
      .dump();
}

Saved saved_of(const std::string& path, const Safetensors& file) {
  const auto found = file.metadata.find(kCheckpointKey);
  MOXIE_CHECK(found != file.metadata.end() && file.has_checksum, "'", path,
              "' is no checkpoint of moxie train");
  const nlohmann::json json = parse_json(path, found->second, {.deepest = kDeepest});
  try {
    const nlohmann::json& at = json.at("position");
    const auto count_of = [&](const char* name) {
      const nlohmann::json& value = at.at(name);
      const bool is_count =
          value.is_number_unsigned() && value.get<uint64_t>() < static_cast<uint64_t>(kTooMany);
      MOXIE_CHECK(is_count, "'", path, "': its step or window is none: ", printable(at.dump()));
      return value.get<int64_t>();
    };
    return {.config = saved_config(json.at("config"), "'" + path + "'"),
            .position = {.step = count_of("step"),
                         .window = count_of("window"),
                         .data_fingerprint = at.at("data_fingerprint"),
                         .seconds = at.at("seconds")},
            .metrics = json.value("metrics", std::string())};
  } catch (const nlohmann::json::exception& error) {
    fail("'", path, "' is no checkpoint of this version of moxie: ", printable(error.what()));
  }
}

std::string checkpoint_path(const std::string& folder, int64_t step) {
  std::string digits = std::to_string(step);
  digits.insert(0, static_cast<size_t>(std::max<int64_t>(0, kDigits - std::ssize(digits))), '0');
  return (fs::path(folder) / (std::string(kPrefix) + digits + std::string(kSuffix))).string();
}

bool is_checkpoint_name(std::string_view name) {
  return name.size() > kPrefix.size() + kSuffix.size() && name.starts_with(kPrefix) &&
         name.ends_with(kSuffix);
}

int64_t named_step(const std::string& path) {
  const std::string name = fs::path(path).filename().string();
  if (!is_checkpoint_name(name)) return -1;
  const char *begin = name.data() + kPrefix.size(),
             *end = name.data() + name.size() - kSuffix.size();
  int64_t step = -1;
  const auto [stop, error] = std::from_chars(begin, end, step);
  return error == std::errc() && stop == end && step >= 0 ? step : -1;
}

std::vector<Checkpoint> find_checkpoints(const std::string& folder) {
  std::vector<Checkpoint> found;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(folder, error))
    if (is_checkpoint_name(entry.path().filename().string()))
      found.push_back(read_checkpoint(entry.path().string()));
  const auto order = [](const Checkpoint& c) {
    const int64_t step = c.saved.position.step;
    return std::tuple(!c.problem.empty(), -step, named_step(c.path) != step, c.path);
  };
  std::sort(found.begin(), found.end(),
            [&](const Checkpoint& a, const Checkpoint& b) { return order(a) < order(b); });
  return found;
}

}  // namespace moxie::cli
