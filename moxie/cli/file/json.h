// Parses JSON that may be damaged or malicious.
#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>

namespace moxie::cli {

// Limits for a JSON text. most_values is one because a value takes up to 200 bytes in memory,
// however short its text.
struct JsonLimits {
  int deepest = 1;              // levels of nesting; 1 for a flat object
  size_t most_bytes = 1 << 20;  // of the text
  size_t most_values = 1'000'000;
};

// Parses a text; throws Error, with the path, unless it is JSON within the limits and no object has
// a key twice.
nlohmann::json parse_json(const std::string& path, std::string_view text, const JsonLimits& limits);

// Parses a text; returns nothing if it is not valid or not within the limits.
std::optional<nlohmann::json> try_parse_json(std::string_view text, const JsonLimits& limits);

// Reads a field of an object. Throws Error with the path and the name unless it is an integer that
// fits int64.
int64_t integer_of(const std::string& path, const nlohmann::json& object, const char* name);

// Makes text from a file safe to show in one line of a message or a table: every character but
// printable ASCII becomes '?', and text longer than `most` is cut.
std::string printable(std::string_view text, size_t most = 200);

}  // namespace moxie::cli
