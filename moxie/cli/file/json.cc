#include "moxie/cli/file/json.h"

#include <set>
#include <vector>

#include "moxie/core/base/check.h"

namespace moxie::cli {

using Json = nlohmann::json;

Json parse_json(const std::string& path, std::string_view text, int deepest) {
  std::vector<std::set<std::string>> keys;
  const Json::parser_callback_t check = [&](int depth, Json::parse_event_t event, Json& value) {
    MOXIE_CHECK(depth <= deepest, "'", path, "': its JSON is nested too deeply");
    if (event == Json::parse_event_t::object_start) keys.emplace_back();
    if (event == Json::parse_event_t::object_end) keys.pop_back();
    if (event == Json::parse_event_t::key)
      MOXIE_CHECK(keys.back().insert(value.get<std::string>()).second, "'", path,
                  "': its JSON has twice the key ", printable(value.dump()));
    return true;
  };
  try {
    return Json::parse(text, check);
  } catch (const Json::exception& error) {
    fail("'", path, "': this is no JSON: ", printable(error.what()));
  }
}

std::string printable(std::string_view text, size_t most) {
  std::string shown(text.substr(0, most));
  for (char& c : shown)
    if (c < ' ' || c > '~') c = '?';
  return text.size() > most ? shown + ".." : shown;
}

}  // namespace moxie::cli
