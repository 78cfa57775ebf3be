// Parsing of untrusted or damaged JSON.
#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>

namespace moxie::cli {

// Limits on what is parsed. A value takes up to 200 bytes in memory, however short its text.
struct JsonLimits {
  int deepest = 1;              // levels below the first
  size_t most_bytes = 1 << 20;  // of the text
  size_t most_values = 1'000'000;
};

// Throws Error, with the path, unless the text is JSON within the limits and without duplicate
// keys.
nlohmann::json parse_json(const std::string& path, std::string_view text, const JsonLimits& limits);

// The same for one of many lines; returns nothing if it is not valid.
std::optional<nlohmann::json> try_parse_json(std::string_view text, const JsonLimits& limits);

// A field that must be an integer and fit int64; else throws Error with the path and the name.
int64_t integer_of(const std::string& path, const nlohmann::json& object, const char* name);

// Text of a file for one line of a message or a table: control characters become '?', and text
// longer than `most` is cut.
std::string printable(std::string_view text, size_t most = 200);

}  // namespace moxie::cli
