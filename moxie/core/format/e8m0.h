// e8m0: a power of two, code - 127, in one byte; 255 is NaN. The scale of an MX block, and the
// four rules that choose it from the block's amax. NUMERICS.md, section 2.
#pragma once

#include <bit>
#include <cstdint>

namespace moxie {

struct e8m0 {
  uint8_t code = 0;
  constexpr bool operator==(const e8m0&) const = default;
};

inline constexpr uint8_t kE8m0Nan = 255;

// value = 2^(code - 127). Code 0 is 2^-127, a subnormal f32: shifting the code into the exponent
// field would give 0 instead, and 255 would give infinity.
constexpr float to_float(e8m0 scale) {
  if (scale.code == 0) return 0x1p-127f;
  if (scale.code == kE8m0Nan) return std::bit_cast<float>(0x7fc00000u);
  return std::bit_cast<float>(static_cast<uint32_t>(scale.code) << 23);
}

// What an element is multiplied with before it is rounded: 2^(127 - code), NaN for code 255.
constexpr float inverse(e8m0 scale) {
  if (scale.code == kE8m0Nan) return to_float(scale);
  return to_float(e8m0{static_cast<uint8_t>(254 - scale.code)});
}

enum class ScaleRule : uint8_t {
  kRceil,  // the smallest scale at which nothing saturates: amax <= 448 * scale
  kFloor,  // 2^(floor(log2 amax) - 8): values above 448 * scale saturate
  kCeil,   // 2^(ceil(log2 amax) - 8)
  kEven,   // as floor, but from 1.9375 * 2^n on amax counts as 2^(n + 1)
};

constexpr const char* name(ScaleRule rule) {
  switch (rule) {
    case ScaleRule::kRceil: return "rceil";
    case ScaleRule::kFloor: return "floor";
    case ScaleRule::kCeil: return "ceil";
    case ScaleRule::kEven: return "even";
  }
  return "?";
}

// The scale of a block whose largest magnitude is amax (>= 0, or NaN). Integer arithmetic only, so
// that neither the rounding mode nor flush-to-zero can change a scale.
constexpr e8m0 scale_of(float amax, ScaleRule rule) {
  const auto bits = std::bit_cast<uint32_t>(amax);
  const auto exponent = static_cast<int32_t>(bits >> 23);
  const uint32_t mantissa = bits & 0x7fffff;
  if (exponent >= 255) return {kE8m0Nan};
  int32_t code = exponent - 8;  // 2^8 is the largest power of two in e4m3
  switch (rule) {
    case ScaleRule::kRceil:
      // 448 = 1.75 * 2^8, so the next power is needed above a mantissa of 1.75. The rule is
      // defined by f32(amax / 448) rounded up; one ulp above 448 * 2^-127 that quotient still
      // rounds to the subnormal 2^-127, hence the term for exponent 8.
      code += mantissa > 0x600000u + (exponent == 8);
      break;
    case ScaleRule::kFloor: break;
    case ScaleRule::kCeil: code += mantissa > 0; break;
    case ScaleRule::kEven:
      code += mantissa >= 0x780000u;
      // Rounding up past the largest power of two gives infinity: the scale is NaN.
      if (exponent == 254 && mantissa >= 0x780000u) return {kE8m0Nan};
      break;
  }
  return {static_cast<uint8_t>(code < 0 ? 0 : code)};
}

}  // namespace moxie
