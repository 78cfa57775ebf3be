// The rules of scale_of() without their branches, and scales as the factors kernels multiply with.
#pragma once

#include <bit>
#include <cstdint>

#include "moxie/core/base/math.h"
#include "moxie/core/format/e8m0.h"

namespace moxie::cuda {

// Every rule rounds the bits of amax up by a constant and keeps the exponent.
struct ScaleChoice {
  uint32_t round;
  uint32_t limit;  // magnitudes from here on have no scale: NaN, infinity and what rounds to it
};

constexpr ScaleChoice choice_of(ScaleRule rule) {
  switch (rule) {
    case ScaleRule::kRceil: return {0x1fffff, 0x7f800000};
    case ScaleRule::kFloor: return {0, 0x7f800000};
    case ScaleRule::kCeil: return {0x7fffff, 0x7f800000};
    case ScaleRule::kEven: return {0x080000, 0x7f780000};
  }
  return {};
}

// scale_of(), by the bits of amax.
constexpr uint32_t code_of(uint32_t amax, ScaleChoice choice) {
  // One ulp above 448 * 2^-127, where RCEIL rounds down; no other rule tells the two apart.
  const uint32_t bits = amax - (amax == 0x04600001u);
  const uint32_t exponent = (bits + choice.round) >> 23;
  return amax >= choice.limit ? kE8m0Nan : max(exponent, 8u) - 8u;
}

// Any e8m0 as a float, without to_float()'s branches: only the first and the last code have a
// mantissa bit, 2^-127 being subnormal and 255 NaN.
constexpr float factor_of(uint32_t code) {
  return std::bit_cast<float>(code << 23 | ((code + 1 & 0xff) < 2 ? 0x400000u : 0u));
}

// inverse() of a code that code_of() gave: those end at 247, or are NaN.
constexpr float inverse_of(uint32_t code) {
  return std::bit_cast<float>(code == kE8m0Nan ? 0x7fc00000u : (254u - code) << 23);
}

}  // namespace moxie::cuda
