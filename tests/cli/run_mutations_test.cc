// Reads folders of runs in which one file was changed, randomly or with knowledge of its format and
// checksum. Each must give an error, a note, or unchanged results. MOXIE_RUN_FUZZ_CASES folders
// (default 1000), from MOXIE_RUN_FUZZ_FIRST on.
#include <gmock/gmock.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <cstdlib>
#include <functional>
#include <map>

#include "moxie/cli/file/error.h"
#include "moxie/core/base/check.h"
#include "tests/cli/run_files.h"
#include "tests/support/random.h"

namespace moxie::testing {
namespace {

using namespace moxie::cli;
using Json = nlohmann::ordered_json;

int64_t from_environment(const char* name, int64_t otherwise) {
  const char* text = std::getenv(name);
  return text != nullptr ? std::atoll(text) : otherwise;
}

size_t place(Random& random, const std::string& bytes) {
  return static_cast<size_t>(random.below(std::max<int64_t>(std::ssize(bytes), 1)));
}

// ---- of bytes ----------------------------------------------------------------------------------

std::string changed_bytes(Random& random, std::string bytes) {
  if (bytes.empty()) return "x";
  const size_t at = place(random, bytes), other = place(random, bytes);
  switch (random.below(7)) {
    case 0: bytes[at] ^= static_cast<char>(1 << random.below(8)); break;
    case 1: bytes.resize(at); break;
    case 2: bytes.erase(at, 1 + other / 8); break;
    case 3: bytes.insert(at, bytes.substr(other, 200)); break;
    case 4:
      bytes.append(static_cast<size_t>(random.between(1, 100)), random.pick({'\0', '}'}));
      break;
    case 5: bytes[at] = random.pick({'0', '9', '\n', '"', '[', '\x1b'}); break;
    default: bytes.insert(at, std::string(200000, random.pick({'[', '('})));
  }
  return bytes;
}

// ---- of JSON -----------------------------------------------------------------------------------

Json odd_value(Random& random) {
  const std::vector<Json> values = {nullptr,
                                    true,
                                    -1,
                                    0,
                                    1,
                                    2,
                                    5,
                                    1.5,
                                    1e300,
                                    UINT64_MAX,
                                    INT64_MIN,
                                    "",
                                    "bf16",
                                    "\x1b[2J",
                                    Json::array(),
                                    Json::object(),
                                    Json::array({"bf16"}),
                                    Json::array({Json::array({1})}),
                                    std::string(300000, 'x')};
  return values[static_cast<size_t>(random.below(std::ssize(values)))];
}

// A plausible value close to `value`.
Json near_value(Random& random, const Json& value) {
  if (value.is_number_integer()) return value.get<int64_t>() + random.pick<int64_t>({-1, 1, 4});
  if (value.is_number_float()) return value.get<double>() * random.pick({0.5, 1.0000001, 2.0});
  if (value.is_boolean()) return !value.get<bool>();
  if (value.is_string())
    return value.get<std::string>() + random.pick<const char*>({"x", " ", "0"});
  return odd_value(random);
}

void change_field(Random& random, Json& object) {
  if (!object.is_object() || object.empty()) return;
  const auto at = std::next(object.begin(), random.below(std::ssize(object)));
  const std::string key = at.key();
  if (at.value().is_object() && random.chance(70)) return change_field(random, at.value());
  switch (random.below(5)) {
    case 0: object.erase(key); break;
    case 1: object[key + "2"] = at.value(); break;
    case 2: object[key] = odd_value(random); break;
    default: object[key] = near_value(random, at.value());
  }
}

std::string changed_json(Random& random, const std::string& text) {
  Json json = Json::parse(text);
  change_field(random, json);
  return json.dump(2) + "\n";
}

std::string changed_lines(Random& random, const std::string& text) {
  std::vector<std::string> lines;
  for (size_t start = 0; start < text.size();) {
    const size_t end = text.find('\n', start) + 1;
    lines.push_back(text.substr(start, end - start));
    start = end;
  }
  const size_t at = static_cast<size_t>(random.below(std::ssize(lines)));
  const size_t other = static_cast<size_t>(random.below(std::ssize(lines)));
  const auto where = lines.begin() + static_cast<ptrdiff_t>(at);
  switch (random.below(6)) {
    case 0: lines.erase(where); break;
    case 1: lines.insert(where, lines[other]); break;
    case 2: std::swap(lines[at], lines[other]); break;
    case 3:
      lines.insert(where, random.pick<const char*>({"\n", "{}\n", "[[[1\n", "{\"step\":1e9}\n"}));
      break;
    default: {
      Json json = Json::parse(lines[at]);
      change_field(random, json);
      lines[at] = json.dump() + "\n";
    }
  }
  std::string joined;
  for (const std::string& line : lines) joined += line;
  return joined;
}

// ---- of checkpoints ----------------------------------------------------------------------------

std::string changed_checkpoint(Random& random, const std::string& file) {
  Json header = Json::parse(header_of(file));
  std::string bytes = file;
  switch (random.below(4)) {
    case 0: {  // the config and position in its metadata
      Json& text = header["__metadata__"][kCheckpointKey];
      Json about = Json::parse(text.get<std::string>());
      change_field(random, about);
      text = about.dump();
      bytes = with_header(file, header.dump());
      break;
    }
    case 1: {  // step and window, which still fit each other: only the metrics contradict them
      Json& text = header["__metadata__"][kCheckpointKey];
      Json about = Json::parse(text.get<std::string>());
      const int64_t step = random.between(0, 9);
      about["position"]["step"] = step;
      about["position"]["window"] = step * Config().batch;
      text = about.dump();
      bytes = with_header(file, header.dump());
      break;
    }
    case 2: {  // one bit of a tensor
      const size_t data = 8 + header_of(file).size();
      bytes[data + static_cast<size_t>(random.below(std::ssize(file) - std::ssize(header_of(file)) -
                                                    8))] ^= static_cast<char>(1 << random.below(8));
      break;
    }
    default:  // its header
      change_field(random, header);
      bytes = with_header(file, header.dump());
  }
  return with_checksum(bytes);
}

// ---- what is believed --------------------------------------------------------------------------

// What a resumed run takes over from its folder or shows of it.
struct Believed {
  Json config = {};
  std::map<std::string, std::string> tensors = {};
  int64_t step = 0;
  std::string position = {};
  std::string result = {};  // empty: the run is not finished
  Words lines = {};         // lines of the metrics, up to the step
  Words end = {};           // lines of the metrics that a finished run writes at its end
  Words notes = {};
};

void read_lines(const std::string& path, Believed& seen) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    const Json json = Json::parse(line, nullptr, /*allow_exceptions=*/false);
    if (!json.is_object() || !json.value("step", Json()).is_number_integer()) continue;
    const bool is_end = json.value("final", Json()) == Json(true);
    if (is_end) {
      std::string fields;
      for (const char* name : {"event", "step", "loss", "windows", "checksum"})
        fields += (json.contains(name) ? json[name].dump() : "") + " ";
      seen.end.push_back(fields);
    } else if (json.at("step").get<int64_t>() <= seen.step &&
               json.value("event", Json()) != Json("checkpoint")) {
      seen.lines.push_back(line);
    }
  }
  std::sort(seen.end.begin(), seen.end.end());  // their order does not matter
}

Believed believe(const RunFolder& run) {
  RunState state = read_run(run);
  const std::optional<Result> result = finished_result(run, state.config.steps, state);
  Believed seen{.config = to_json(state.config), .notes = state.notes};
  for (const char* name : {"out", "title", "save_weights"}) seen.config.erase(name);
  if (state.newest) {
    const Safetensors file = read_safetensors(state.newest->path);
    for (const TensorEntry& entry : file.tensors)
      seen.tensors[entry.name + entry.dtype + std::to_string(entry.shape.size())] = entry.bytes;
    const Position at = saved_of(state.newest->path, file).position;
    seen.step = at.step;
    seen.position = std::to_string(at.window) + at.data_fingerprint + std::to_string(at.seconds);
  }
  if (result) seen.result = to_json(*result).dump();
  read_lines(run.metrics(), seen);
  return seen;
}

class RunMutations : public ::testing::Test {
 protected:
  // What an unchanged run gives, by the step that it resumes from: 4, or 2 if its last checkpoint
  // is missing.
  std::map<int64_t, Believed> genuine(RunFiles::End end) {
    files_.write(end);
    std::map<int64_t, Believed> all;
    all[4] = believe(files_.run);
    std::filesystem::remove(files_.checkpoint(4));
    all[2] = believe(files_.run);
    files_.write(end);
    whole_.clear();
    for (const auto& entry : std::filesystem::recursive_directory_iterator(files_.run.path))
      if (entry.is_regular_file()) {
        const auto name = entry.path().lexically_relative(folder_.path()).string();
        whole_[name] = folder_.read(name);
      }
    return all;
  }

  void restore() {
    std::filesystem::remove_all(files_.run.path);
    for (const auto& [name, bytes] : whole_) folder_.write(name, bytes);
  }

  void change(Random& random) {
    const std::string in = "run/";
    const char* names[] = {"config.json", "metrics.jsonl", "result.json",
                           "checkpoints/step-00000004.safetensors",
                           "checkpoints/step-00000002.safetensors"};
    std::string name = names[random.below(5)];
    if (!std::filesystem::exists(folder_.path(in + name))) name = "config.json";
    const std::string path = folder_.path(in + name), before = folder_.read(in + name);
    what_ = name;
    if (random.chance(10)) return replace(random, path);
    if (random.chance(35))
      folder_.write(in + name, changed_bytes(random, before));
    else if (name == "metrics.jsonl")
      folder_.write(in + name, changed_lines(random, before));
    else if (name.starts_with("checkpoints"))
      folder_.write(in + name, changed_checkpoint(random, before));
    else
      folder_.write(in + name, changed_json(random, before));
  }

  void replace(Random& random, const std::string& path) {
    what_ += " replaced";
    const std::string bytes =
        folder_.read(std::filesystem::relative(path, folder_.path()).string());
    std::filesystem::remove(path);
    switch (random.below(5)) {
      case 0: break;
      case 1: std::filesystem::create_directory(path); break;
      case 2: std::filesystem::create_symlink("nowhere", path); break;
      case 3: ASSERT_EQ(::mkfifo(path.c_str(), 0600), 0); break;
      default:
        folder_.write(random.pick<const char*>({"run/checkpoints/step-00000009.safetensors",
                                                "run/checkpoints/step-x.safetensors",
                                                "run/checkpoints/step-1.safetensors"}),
                      bytes);
    }
  }

  Folder folder_;
  RunFiles files_{folder_};
  std::string what_;
  std::map<std::string, std::string> whole_;  // the files of the run
};

TEST_F(RunMutations, AreRefusedOrSaidOrChangeNoNumber) {
  const int64_t first = from_environment("MOXIE_RUN_FUZZ_FIRST", 0);
  const int64_t cases = from_environment("MOXIE_RUN_FUZZ_CASES", 1000);
  std::map<std::string, int64_t> outcomes;
  for (const auto end : {RunFiles::End::kFinished, RunFiles::End::kStopped}) {
    const std::map<int64_t, Believed> genuine_by_step = genuine(end);
    ASSERT_TRUE(genuine_by_step.at(4).notes.empty());
    for (int64_t i = first; i < first + cases / 2; ++i) {
      Random random(static_cast<uint64_t>(2 * i + (end == RunFiles::End::kStopped)));
      change(random);
      SCOPED_TRACE("case " + std::to_string(i) + ": " + what_);
      try {
        const Believed seen = believe(files_.run);
        if (!seen.notes.empty()) {
          ++outcomes["said"];
        } else {
          ++outcomes["same"];
          ASSERT_TRUE(genuine_by_step.contains(seen.step)) << seen.step;
          const Believed& right = genuine_by_step.at(seen.step);
          EXPECT_EQ(seen.config, right.config);
          EXPECT_EQ(seen.tensors, right.tensors);
          EXPECT_EQ(seen.position, right.position);
          EXPECT_EQ(seen.lines, right.lines);
          if (!seen.result.empty()) {
            EXPECT_EQ(seen.result, right.result);
            EXPECT_EQ(seen.end, right.end);
          }
        }
      } catch (const Error& error) {
        ++outcomes["refused"];
        EXPECT_THAT(error.what(), ::testing::HasSubstr(folder_.path()));
      } catch (const IoError& error) {
        ++outcomes["refused"];
        EXPECT_THAT(error.what(), ::testing::HasSubstr(folder_.path()));
      }
      if (HasFailure()) return;
      restore();
    }
  }
  for (const auto& [outcome, count] : outcomes) RecordProperty(outcome, std::to_string(count));
  std::printf("refused %ld, said %ld, same %ld\n", static_cast<long>(outcomes["refused"]),
              static_cast<long>(outcomes["said"]), static_cast<long>(outcomes["same"]));
  rusage usage = {};
  ::getrusage(RUSAGE_SELF, &usage);
  EXPECT_LT(usage.ru_maxrss, 1 << 20) << "KiB: no file takes a gigabyte of memory";
}

}  // namespace
}  // namespace moxie::testing
