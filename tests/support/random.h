// Random test data from a seed, the same on every machine.
#pragma once

#include <bit>
#include <cstdint>
#include <vector>

#include "moxie/core/format/bf16.h"

namespace moxie::testing {

class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15ull + 1) {}

  uint64_t bits() {  // splitmix64
    uint64_t z = (state_ += 0x9e3779b97f4a7c15ull);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
  }
  int64_t below(int64_t n) { return static_cast<int64_t>(bits() % static_cast<uint64_t>(n)); }
  int64_t between(int64_t low, int64_t high) { return low + below(high - low + 1); }
  bool chance(int percent) { return below(100) < percent; }
  template <class T>
  T pick(std::initializer_list<T> choices) {
    return choices.begin()[below(static_cast<int64_t>(choices.size()))];
  }

 private:
  uint64_t state_;
};

// The distribution of a tensor's values.
enum class Data {
  kGaussianLike,  // magnitudes 2^-7 to 2, some zeros
  kWide,          // every exponent, including subnormals and both ends
  kSpecial,       // as kWide, with some NaN and infinity
  kBits,          // any bit pattern
  kZero,
};

inline float random_value(Random& random, Data data) {
  const uint64_t bits = random.bits();
  const auto sign = static_cast<uint32_t>(bits >> 63) << 31;
  const auto mantissa = static_cast<uint32_t>(bits) & 0x7fffff;
  const auto pick = static_cast<uint32_t>(bits >> 24) & 0xffff;
  switch (data) {
    case Data::kGaussianLike:
      if (pick % 64 == 0) return std::bit_cast<float>(sign);
      return std::bit_cast<float>(sign | (120 + pick % 8) << 23 | mantissa);
    case Data::kSpecial:
      if (pick % 97 == 0) return std::bit_cast<float>(sign | 0x7f800000u);
      if (pick % 89 == 0) return std::bit_cast<float>(sign | 0x7fc00000u | (mantissa & 0xff0000));
      [[fallthrough]];
    case Data::kWide: return std::bit_cast<float>(sign | (pick % 255) << 23 | mantissa);
    case Data::kBits: return std::bit_cast<float>(static_cast<uint32_t>(bits >> 16));
    case Data::kZero: return std::bit_cast<float>(sign);
  }
  return 0;
}

// With kWide, 16 neighbours have similar exponents (0 to 7 below a common one). Otherwise a block
// would consist of one large value and others that quantize to 0.
template <class T>
std::vector<T> random_values(Random& random, int64_t count, Data data) {
  std::vector<T> values(count);
  uint32_t exponent = 0;
  for (int64_t i = 0; i < count; ++i) {
    float value = random_value(random, data);
    if (data == Data::kWide) {
      if (i % 16 == 0) exponent = static_cast<uint32_t>(random.below(255));
      const auto bits = std::bit_cast<uint32_t>(value);
      const uint32_t lower = exponent > (bits & 7) ? exponent - (bits & 7) : 0;
      value = std::bit_cast<float>((bits & 0x807fffff) | lower << 23);
    }
    if constexpr (std::is_same_v<T, bf16>)
      values[i] = {static_cast<uint16_t>(std::bit_cast<uint32_t>(value) >> 16)};
    else
      values[i] = value;
  }
  return values;
}

template <class T>
std::vector<T> random_bytes(Random& random, int64_t count) {
  static_assert(sizeof(T) == 1);
  std::vector<T> values(count);
  for (auto& value : values) value = std::bit_cast<T>(static_cast<uint8_t>(random.bits() >> 8));
  return values;
}

// Ends of num_groups ragged groups over at most `rows` rows. Groups may be empty, or have one row,
// exactly 128 rows or all rows; half of the time the last rows may belong to no group.
inline std::vector<int32_t> random_offs(Random& random, int64_t rows, int64_t num_groups) {
  std::vector<int32_t> offs(num_groups);
  const int64_t style = random.below(5);
  const int64_t covered = random.chance(50) ? rows : random.between(0, rows);
  const int64_t favourite = random.below(num_groups);
  int64_t end = 0;
  for (int64_t g = 0; g < num_groups; ++g) {
    int64_t size = 0;
    switch (style) {
      case 0: size = random.below(2 * (rows / num_groups) + 2); break;
      case 1: size = random.pick<int64_t>({0, 0, 1, 127, 128, 129, 31, 32, 33}); break;
      case 2: size = g == favourite ? rows : 0; break;
      case 3: size = random.pick<int64_t>({0, 1, 128, 256}); break;
      default: size = rows / num_groups;
    }
    end = end + size > covered ? covered : end + size;
    offs[g] = static_cast<int32_t>(end);
  }
  return offs;
}

}  // namespace moxie::testing
