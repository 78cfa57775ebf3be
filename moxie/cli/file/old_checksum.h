// The 64-bit checksum of safetensors files of format 1. A Corpus also orders its files and computes
// its fingerprint with it, which cannot change: a resumed run would split its text differently. New
// code uses Checksum (checksum.h).
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

namespace moxie::cli {

class OldChecksum {
 public:
  void add(std::string_view bytes);
  std::string hex() const;  // 16 digits

 private:
  static constexpr size_t kLanes = 4;  // independent lanes, so that their multiplications overlap
  void add_block(const char* block);
  std::array<uint64_t, kLanes> lanes_ = {1, 2, 3, 4};
  std::array<char, kLanes * sizeof(uint64_t)> rest_ = {};
  size_t in_rest_ = 0;
  uint64_t size_ = 0;
};

}  // namespace moxie::cli
