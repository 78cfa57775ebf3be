// JSON that somebody else may have written, or that is damaged.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace moxie::cli {

// Error, with the path, unless the text is JSON of at most `deepest` levels below its first, in
// which no object has a key twice.
nlohmann::json parse_json(const std::string& path, std::string_view text, int deepest);

// Text of a file on one line of a message or a table: whatever a terminal could take for a command
// becomes '?', and what is longer than `most` is cut.
std::string printable(std::string_view text, size_t most = 200);

}  // namespace moxie::cli
