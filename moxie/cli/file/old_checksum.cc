#include "moxie/cli/file/old_checksum.h"

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstring>

#include "moxie/cli/file/checksum.h"

namespace moxie::cli {
namespace {

constexpr uint64_t kOdd = 0x9e3779b97f4a7c15;  // 2^64 / golden ratio: its bits have no pattern
constexpr uint64_t kOther = 0xd6e8feb86659fd93;

// Mixes a word into a lane. For a fixed word this is a bijection of the lane, and for a fixed lane
// a bijection of the word, so that a change of one word always changes the result. If the word were
// multiplied only once, its top bit would affect only the top bit, and one bit of the next word
// could undo a change there, whatever the data. After the second multiplication, which bits could
// undo it depends on the data.
constexpr uint64_t mix(uint64_t lane, uint64_t word) {
  return std::rotl(lane ^ (std::rotl(word * kOdd, 31) * kOther), 27) * kOdd;
}

}  // namespace

void OldChecksum::add_block(const char* block) {
  for (uint64_t& lane : lanes_) {
    uint64_t word;
    std::memcpy(&word, block, sizeof word);
    lane = mix(lane, word);
    block += sizeof word;
  }
}

void OldChecksum::add(std::string_view bytes) {
  size_ += bytes.size();
  while (!bytes.empty()) {
    if (in_rest_ == 0 && bytes.size() >= rest_.size()) {
      add_block(bytes.data());
      bytes.remove_prefix(rest_.size());
      continue;
    }
    const size_t count = std::min(rest_.size() - in_rest_, bytes.size());
    std::memcpy(rest_.data() + in_rest_, bytes.data(), count);
    bytes.remove_prefix(count);
    in_rest_ += count;
    if (in_rest_ < rest_.size()) return;
    add_block(rest_.data());
    in_rest_ = 0;
  }
}

std::string OldChecksum::hex() const {
  OldChecksum last = *this;
  std::fill(last.rest_.begin() + static_cast<ptrdiff_t>(in_rest_), last.rest_.end(), '\0');
  last.add_block(last.rest_.data());
  uint64_t sum = size_;
  for (const uint64_t lane : last.lanes_) sum = mix(sum, lane);
  sum = mix(sum, sum >> 32);
  return hex_digits(sum);
}

}  // namespace moxie::cli
