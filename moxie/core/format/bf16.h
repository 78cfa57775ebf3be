// bf16: the upper half of an f32.
#pragma once

#include <bit>
#include <cstdint>

namespace moxie {

struct bf16 {
  uint16_t bits = 0;
  constexpr bool operator==(const bf16&) const = default;
};

constexpr float to_float(bf16 value) {
  return std::bit_cast<float>(static_cast<uint32_t>(value.bits) << 16);
}
constexpr float to_float(float value) { return value; }

// Round to nearest even; NaN stays NaN (quiet, 0x7fc0 or 0xffc0).
constexpr bf16 to_bf16(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const uint32_t quiet = ((bits >> 16) & 0x8000) | 0x7fc0;
  return {static_cast<uint16_t>((bits & 0x7fffffff) > 0x7f800000 ? quiet : rounded)};
}

}  // namespace moxie
