// e4m3 (the "fn" variant): sign, 4 exponent bits with bias 7, 3 mantissa bits. No infinity;
// 0x7f and 0xff are NaN; the largest value is 448, the smallest 2^-9. NUMERICS.md, section 1.
#pragma once

#include <bit>
#include <cstdint>

namespace moxie {

struct e4m3 {
  uint8_t bits = 0;
  constexpr bool operator==(const e4m3&) const = default;
};

inline constexpr float kE4m3Max = 448.f;
inline constexpr uint8_t kE4m3Nan = 0x7f;  // encoding of NaN of either sign

// Rounds to nearest even, saturates at +-448 (infinity too), keeps the sign of zero. Branch-free,
// so that a compiler can vectorise it.
constexpr e4m3 to_e4m3(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = (bits >> 24) & 0x80;
  const uint32_t magnitude = bits & 0x7fffffff;
  constexpr uint32_t kMaxBits = 0x43e00000;        // 448
  constexpr uint32_t kMinNormalBits = 0x3c800000;  // 2^-6
  const uint32_t clipped = magnitude < kMaxBits ? magnitude : kMaxBits;
  // Normal: drop 20 mantissa bits with a carry that may reach the exponent, then rebias 127 -> 7.
  const uint32_t normal = (clipped + 0x7ffff + ((clipped >> 20) & 1) - (120u << 23)) >> 20;
  // Subnormal: the e4m3 grid there is 2^-9, which is the last mantissa bit of floats in
  // [2^14, 2^15). So one f32 addition rounds exactly as e4m3 must.
  const uint32_t subnormal =
      std::bit_cast<uint32_t>(std::bit_cast<float>(clipped) + 0x1p14f) - 0x46800000;
  const uint32_t code = sign | (clipped < kMinNormalBits ? subnormal : normal);
  return {static_cast<uint8_t>(magnitude > 0x7f800000 ? kE4m3Nan : code)};
}

// Both NaN bytes give the canonical NaN 0x7fc00000, so that results do not depend on how a machine
// propagates the sign of a NaN.
constexpr float to_float(e4m3 value) {
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x80) << 24;
  const uint32_t code = value.bits & 0x7f;
  // A subnormal is exactly code * 2^-9; a normal number is shifted and rebiased.
  const auto subnormal = std::bit_cast<uint32_t>(static_cast<float>(code) * 0x1p-9f);
  const uint32_t normal = (code << 20) + (120u << 23);
  const uint32_t magnitude = code < 8 ? subnormal : normal;
  return std::bit_cast<float>(code == 0x7f ? 0x7fc00000u : sign | magnitude);
}

}  // namespace moxie
