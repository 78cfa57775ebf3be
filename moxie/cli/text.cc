#include "moxie/cli/text.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <numeric>

namespace moxie::cli {
namespace {

template <class... Args>
std::string format(const char* pattern, Args... args) {
  char text[64];
  std::snprintf(text, sizeof text, pattern, args...);
  return text;
}

// Number of bytes of the UTF-8 character at the start of the text; 0 if it must not be shown: not
// valid UTF-8, a control character, or one that changes the direction of text.
size_t shown_bytes(std::string_view text) {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned first = byte(0);
  if (first < 0x80) return first >= ' ' && first != 0x7f ? 1 : 0;
  const size_t count = first >= 0xf0 ? 4 : first >= 0xe0 ? 3 : 2;
  if (first < 0xc2 || first > 0xf4 || text.size() < count) return 0;
  unsigned code = first & (0x7fu >> count);
  for (size_t i = 1; i < count; ++i) {
    if ((byte(i) & 0xc0u) != 0x80) return 0;
    code = code << 6 | (byte(i) & 0x3fu);
  }
  const bool is_short = (count == 3 && code < 0x800) || (count == 4 && code < 0x10000);
  const bool is_no_character = code > 0x10ffff || (code >= 0xd800 && code < 0xe000);
  const bool is_control = code < 0xa0;
  const bool turns = (code >= 0x202a && code <= 0x202e) || (code >= 0x2066 && code <= 0x2069);
  return is_short || is_no_character || is_control || turns ? 0 : count;
}

// Edit distance of two words: the number of letters to insert, remove or replace.
size_t distance(std::string_view a, std::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), 0);
  for (size_t i = 0; i < a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i + 1;
    for (size_t j = 0; j < b.size(); ++j) {
      const size_t replaced = diagonal + (a[i] != b[j]);
      diagonal = row[j + 1];
      row[j + 1] = std::min({replaced, row[j] + 1, diagonal + 1});
    }
  }
  return row.back();
}

}  // namespace

// Printed in place of printf's nan, -nan, inf and -inf.
constexpr const char* kNotFinite = "not finite";

std::string plain(std::string_view line) {
  std::string shown;
  while (!line.empty()) {
    const size_t count = shown_bytes(line);
    shown += count == 0 ? std::string_view("?") : line.substr(0, count);
    line.remove_prefix(std::max<size_t>(count, 1));
  }
  return shown;
}

std::string plain_lines(std::string_view text) {
  std::string shown;
  for (size_t end; (end = text.find('\n')) != text.npos; text.remove_prefix(end + 1))
    shown += plain(text.substr(0, end)) + "\n";
  return shown + plain(text);
}

std::string short_number(double value) { return format("%g", value); }

std::string fixed(double value, int digits) {
  return std::isfinite(value) ? format("%.*f", digits, value) : kNotFinite;
}

std::string human_bytes(double bytes) {
  if (!std::isfinite(bytes)) return kNotFinite;
  const char* units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  size_t unit = 0;
  for (; bytes >= 1024 && unit + 1 < std::size(units); ++unit) bytes /= 1024;
  return fixed(bytes, unit == 0 ? 0 : 1) + " " + units[unit];
}

std::string human_count(double count) {
  if (!std::isfinite(count)) return kNotFinite;
  if (count < 1000) return format("%.0f", count);
  if (count < 1e6) return format("%.1fk", count / 1e3);
  return count < 1e9 ? format("%.1fM", count / 1e6) : format("%.1fB", count / 1e9);
}

std::string human_time(double seconds) {
  if (!std::isfinite(seconds)) return kNotFinite;
  const auto whole = std::llround(std::clamp(seconds, 0.0, 1e9));
  if (whole < 60) return format("%llds", whole);
  if (whole < 3600) return format("%lldm %02llds", whole / 60, whole % 60);
  return format("%lldh %02lldm", whole / 3600, whole / 60 % 60);
}

std::string did_you_mean(std::string_view word, const std::vector<std::string_view>& known) {
  if (word.size() > 64) return "";
  const auto near = std::min_element(known.begin(), known.end(), [&](auto a, auto b) {
    return distance(word, a) < distance(word, b);
  });
  if (near == known.end() || distance(word, *near) > 1 + word.size() / 3) return "";
  return "; did you mean '" + std::string(*near) + "'?";
}

std::string Table::text() const {
  std::vector<std::vector<std::string>> rows = rows_;
  for (auto& row : rows)
    for (std::string& cell : row) cell = plain(cell);
  std::vector<size_t> widths;
  for (const auto& row : rows) {
    widths.resize(std::max(widths.size(), row.size()));
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  std::string text;
  for (const auto& row : rows) {
    std::string line;
    for (size_t i = 0; i < row.size(); ++i) {
      const std::string gap(widths[i] - row[i].size(), ' ');
      line += (i == 0 ? "" : "  ") + (i == 0 ? row[i] + gap : gap + row[i]);
    }
    text += line.substr(0, line.find_last_not_of(' ') + 1) + "\n";
  }
  return text;
}

}  // namespace moxie::cli
