// Branch-free versions of scale_of(), to_float() and inverse() (e8m0.h) for kernels.
#pragma once

#include <bit>
#include <cstdint>

#include "moxie/core/base/math.h"
#include "moxie/core/format/e8m0.h"

namespace moxie::cuda {

// A scale rule as constants: every rule adds a constant to the bits of amax and takes the exponent.
struct ScaleChoice {
  uint32_t round;
  uint32_t limit;  // bits of amax from which on the scale is NaN (infinity, or rounds to infinity)
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

// scale_of() for the bits of amax.
constexpr uint32_t code_of(uint32_t amax, ScaleChoice choice) {
  // One ulp above 448 * 2^-127, RCEIL still rounds down (see scale_of); for the other rules this
  // ulp makes no difference.
  const uint32_t bits = amax - (amax == 0x04600001u);
  const uint32_t exponent = (bits + choice.round) >> 23;
  return amax >= choice.limit ? kE8m0Nan : max(exponent, 8u) - 8u;
}

// to_float() of any e8m0. Only codes 0 (2^-127, subnormal) and 255 (NaN) have a mantissa bit.
constexpr float factor_of(uint32_t code) {
  return std::bit_cast<float>(code << 23 | (((code + 1) & 0xff) < 2 ? 0x400000u : 0u));
}

// inverse() of a code from code_of(), which is at most 247 or NaN.
constexpr float inverse_of(uint32_t code) {
  return std::bit_cast<float>(code == kE8m0Nan ? 0x7fc00000u : (254u - code) << 23);
}

}  // namespace moxie::cuda
