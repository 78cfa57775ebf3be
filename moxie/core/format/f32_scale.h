// The scale of the fp8_rowwise recipe: one power of two in f32 for a whole row (or for a column of
// a group). NUMERICS.md, section 3.
#pragma once

#include <bit>
#include <cstdint>

#include "moxie/core/base/math.h"

namespace moxie {

struct RowScale {
  float encode;  // multiplied with elements before they are rounded to e4m3
  float decode;  // the stored scale: value = qdata * decode
};

// encode is the largest power of two that is at most f32(448 / amax); amax below 1e-12 counts as
// 1e-12. A row with NaN or infinity has the scale NaN, and all of its elements are NaN.
constexpr RowScale row_scale_of(float amax) {
  if (std::bit_cast<uint32_t>(amax) >= 0x7f800000u) {
    const auto nan = std::bit_cast<float>(0x7fc00000u);
    return {nan, nan};
  }
  const auto quotient = static_cast<float>(448.0 / max(static_cast<double>(amax), 1e-12));
  const uint32_t exponent = std::bit_cast<uint32_t>(quotient) >> 23;  // always a normal number
  return {std::bit_cast<float>(exponent << 23), std::bit_cast<float>((254 - exponent) << 23)};
}

}  // namespace moxie
