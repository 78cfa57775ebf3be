// Formatting of text and numbers for users.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace moxie::cli {

template <class Words>
std::string join(const Words& words, std::string_view between) {
  std::string text;
  for (const auto& word : words) {
    if (!text.empty()) text += between;
    text += word;
  }
  return text;
}

// Makes a line safe for a terminal: bytes that are not UTF-8, and control characters, become '?'.
// For messages, progress and cells of tables, which may contain text from files.
std::string plain(std::string_view line);
std::string plain_lines(std::string_view text);  // line ends stay

std::string short_number(double value);  // 0.05, 1e-08, 1e+09
// These print "not finite" for values that are not.
std::string fixed(double value, int digits);  // fixed(2.5, 2): 2.50
std::string human_bytes(double bytes);        // 1.5 GiB
std::string human_count(double count);        // 12.3k
std::string human_time(double seconds);       // 1m 05s
// "; did you mean 'x'?", or empty if no known word is similar.
std::string did_you_mean(std::string_view word, const std::vector<std::string_view>& known);

// A table whose columns are as wide as their widest cell; the first column is text, the others are
// numbers.
class Table {
 public:
  explicit Table(std::vector<std::string> header) : rows_{std::move(header)} {}
  void add(std::vector<std::string> row) { rows_.push_back(std::move(row)); }
  std::string text() const;

 private:
  std::vector<std::vector<std::string>> rows_;
};

}  // namespace moxie::cli
