#include "moxie/cli/file/json.h"

#include <iterator>
#include <unordered_set>
#include <vector>

#include "moxie/core/base/check.h"

namespace moxie::cli {

using Json = nlohmann::json;

namespace {

// Looks at every level and key once. (The callback of Json::parse() would walk over all of an
// object for each object inside it.)
class Checker : public nlohmann::json_sax<Json> {
 public:
  Checker(const std::string& path, int deepest) : path_(path), deepest_(deepest) {}

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
    MOXIE_CHECK(keys_.back().insert(name).second, "'", path_, "': its JSON has twice the key ",
                printable(Json(name).dump()));
    return true;
  }
  bool parse_error(size_t, const std::string&, const Json::exception& error) override {
    fail("'", path_, "': this is no JSON: ", printable(error.what()));
  }

 private:
  bool see() const {
    MOXIE_CHECK(std::ssize(keys_) <= deepest_, "'", path_, "': its JSON is nested too deeply");
    return true;
  }
  bool enter() {
    see();
    keys_.emplace_back();
    return true;
  }
  bool leave() {
    keys_.pop_back();
    return true;
  }

  const std::string& path_;
  int deepest_;
  std::vector<std::unordered_set<std::string>> keys_;  // of each level; an array has none
};

}  // namespace

Json parse_json(const std::string& path, std::string_view text, int deepest) {
  Checker checker(path, deepest);
  Json::sax_parse(text, &checker);
  return Json::parse(text);
}

std::string printable(std::string_view text, size_t most) {
  std::string shown(text.substr(0, most));
  for (char& c : shown)
    if (c < ' ' || c > '~') c = '?';
  return text.size() > most ? shown + ".." : shown;
}

}  // namespace moxie::cli
