#include "moxie/cli/train/result.h"

#include <filesystem>
#include <limits>

#include "moxie/cli/file/json.h"
#include "moxie/cli/file/mapped_file.h"
#include "moxie/core/base/check.h"

namespace moxie::cli {
namespace {

using Json = nlohmann::json;

// Reads a number. JSON cannot hold NaN or infinity; they are written as null and read as NaN.
double number_of(const Json& json, const char* name) {
  const Json& value = json.at(name);
  return value.is_null() ? std::numeric_limits<double>::quiet_NaN() : value.get<double>();
}

}  // namespace

nlohmann::ordered_json to_json(const Result& result) {
  return {{"steps", result.steps},
          {"parameters", result.parameters},
          {"eval_loss", result.eval_loss},
          {"eval_windows", result.eval_windows},
          {"bigram_entropy", result.bigram_entropy},
          {"data_fingerprint", result.data_fingerprint},
          {"tokens_per_s", result.tokens_per_s},
          {"seconds", result.seconds},
          {"peak_memory_bytes", result.peak_memory_bytes},
          {"device", result.device}};
}

Result read_result(const std::string& path) {
  const MappedFile file(path);
  try {
    const Json json = parse_json(path, file.bytes(), {.deepest = 1});
    return {
        .steps = integer_of(path, json, "steps"),
        .parameters = integer_of(path, json, "parameters"),
        .eval_loss = number_of(json, "eval_loss"),
        .eval_windows = json.contains("eval_windows") ? integer_of(path, json, "eval_windows") : 0,
        .bigram_entropy = number_of(json, "bigram_entropy"),
        .data_fingerprint = json.value("data_fingerprint", std::string()),
        .tokens_per_s = number_of(json, "tokens_per_s"),
        .seconds = number_of(json, "seconds"),
        .peak_memory_bytes = integer_of(path, json, "peak_memory_bytes"),
        .device = json.at("device").get<std::string>()};
  } catch (const nlohmann::json::exception& error) {
    fail("'", path, "' is no result of moxie train: ", printable(error.what()));
  }
}

std::optional<Result> finished_result(const std::string& path, int64_t steps) {
  if (!std::filesystem::exists(path)) return std::nullopt;
  const Result result = read_result(path);
  MOXIE_CHECK(result.steps <= steps, "--steps: the run of '", path, "' has taken ", result.steps,
              " steps already, got ", steps);
  return result.steps == steps ? std::optional(result) : std::nullopt;
}

}  // namespace moxie::cli
