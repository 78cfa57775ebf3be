#include "moxie/cli/file/json.h"

#include <iterator>
#include <unordered_set>
#include <vector>

#include "moxie/core/base/check.h"

namespace moxie::cli {

using Json = nlohmann::json;

namespace {

// Checks the nesting, the keys and the number of values in one pass over the text, before anything
// is built. (The callback of Json::parse() would go through an object again for each object inside
// it.)
class Checker : public nlohmann::json_sax<Json> {
 public:
  explicit Checker(const JsonLimits& limits) : limits_(limits) {}

  const std::string& problem() const { return problem_; }

  bool null() override { return see(); }
  bool boolean(bool) override { return see(); }
  bool number_integer(number_integer_t) override { return see(); }
  bool number_unsigned(number_unsigned_t) override { return see(); }
  bool number_float(number_float_t, const string_t&) override { return see(); }
  bool string(string_t&) override { return see(); }
  bool binary(binary_t&) override { return see(); }
  bool start_object(size_t) override { return enter(); }
  bool end_object() override { return leave(); }
  bool start_array(size_t) override { return enter(); }
  bool end_array() override { return leave(); }
  bool key(string_t& name) override {
    return keys_.back().insert(name).second ||
           refuse("its JSON has twice the key " + printable(Json(name).dump()));
  }
  bool parse_error(size_t, const std::string&, const Json::exception& error) override {
    return refuse("this is no JSON: " + printable(error.what()));
  }

 private:
  bool refuse(std::string why) {
    problem_ = std::move(why);
    return false;
  }
  bool see() {
    if (std::ssize(keys_) > limits_.deepest) return refuse("its JSON is nested too deeply");
    if (++values_ > limits_.most_values)
      return refuse("its JSON has more than " + std::to_string(limits_.most_values) + " values");
    return true;
  }
  bool enter() {
    if (!see()) return false;
    keys_.emplace_back();
    return true;
  }
  bool leave() {
    keys_.pop_back();
    return true;
  }

  const JsonLimits& limits_;
  size_t values_ = 0;
  std::string problem_;
  std::vector<std::unordered_set<std::string>> keys_;  // keys of each level; empty for an array
};

// Why the text is refused; empty if it is valid and within the limits.
std::string problem_of(std::string_view text, const JsonLimits& limits) {
  if (text.size() > limits.most_bytes)
    return std::to_string(text.size()) + " bytes are too many for this JSON, at most " +
           std::to_string(limits.most_bytes) + " are read";
  Checker checker(limits);
  Json::sax_parse(text, &checker);
  return checker.problem();
}

}  // namespace

Json parse_json(const std::string& path, std::string_view text, const JsonLimits& limits) {
  const std::string problem = problem_of(text, limits);
  MOXIE_CHECK(problem.empty(), "'", path, "': ", problem);
  return Json::parse(text);
}

std::optional<Json> try_parse_json(std::string_view text, const JsonLimits& limits) {
  if (!problem_of(text, limits).empty()) return std::nullopt;
  return Json::parse(text);
}

int64_t integer_of(const std::string& path, const Json& object, const char* name) {
  const bool fits = object.is_object() && object.contains(name) &&
                    object[name].is_number_integer() &&
                    !(object[name].is_number_unsigned() &&
                      object[name].get<uint64_t>() > static_cast<uint64_t>(INT64_MAX));
  MOXIE_CHECK(fits, "'", path, "': \"", name, "\" must be an integer");
  return object[name].get<int64_t>();
}

std::string printable(std::string_view text, size_t most) {
  std::string shown(text.substr(0, most));
  for (char& c : shown)
    if (c < ' ' || c > '~') c = '?';
  return text.size() > most ? shown + ".." : shown;
}

}  // namespace moxie::cli
