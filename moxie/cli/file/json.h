// JSON that somebody else may have written, or that is damaged.
#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>

namespace moxie::cli {

// What is parsed at all. Values cost up to 200 bytes each in memory, whatever they take in the
// text.
struct JsonLimits {
  int deepest = 1;              // levels below the first
  size_t most_bytes = 1 << 20;  // of the text
  size_t most_values = 1'000'000;
};

// Error, with the path, unless the text is JSON within the limits in which no object has a key
// twice.
nlohmann::json parse_json(const std::string& path, std::string_view text, const JsonLimits& limits);

// The same for one of many lines, of which some may be no JSON: nothing then.
std::optional<nlohmann::json> try_parse_json(std::string_view text, const JsonLimits& limits);

// An integer that is written as one and fits, or Error with the path and the name of the field.
int64_t integer_of(const std::string& path, const nlohmann::json& object, const char* name);

// Text of a file on one line of a message or a table: whatever a terminal could take for a command
// becomes '?', and what is longer than `most` is cut.
std::string printable(std::string_view text, size_t most = 200);

}  // namespace moxie::cli
