// The checksum of a stream of bytes: XXH3 with 64 bits and seed 0. It detects damage, not malicious
// changes.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

namespace moxie::cli {

std::string hex_digits(uint64_t value);  // 16 digits, most significant first

class Checksum {
 public:
  Checksum();
  ~Checksum();
  void add(std::string_view bytes);
  std::string hex() const;  // 16 digits, as `xxhsum -H3` prints them

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace moxie::cli
