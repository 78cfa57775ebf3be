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

// Makes a line safe for a terminal: bytes that are not UTF-8, control characters, and characters
// that change the direction of text become '?'. Use it for messages, progress and cells of tables,
// which may contain text from files.
std::string plain(std::string_view line);
std::string plain_lines(std::string_view text);  // plain() of each line

std::string short_number(double value);  // 0.05, 1e-08, 1e+09
// The following functions return "not finite" for NaN and infinity.
std::string fixed(double value, int digits);  // fixed(2.5, 2): 2.50
std::string human_bytes(double bytes);        // 1.5 GiB
std::string human_count(double count);        // 12.3k
std::string human_time(double seconds);       // 1m 05s
// "; did you mean 'x'?" with the known word that is most similar; empty if none is similar.
std::string did_you_mean(std::string_view word, const std::vector<std::string_view>& known);

// A text table with columns as wide as their widest cell. The first column is aligned left, as
// text, the others right, as numbers.
class Table {
 public:
  explicit Table(std::vector<std::string> header) : rows_{std::move(header)} {}
  void add(std::vector<std::string> row) { rows_.push_back(std::move(row)); }
  std::string text() const;

 private:
  std::vector<std::vector<std::string>> rows_;
};

}  // namespace moxie::cli
