// Two e4m3 <-> two f16, one instruction each (sm_89 and later). CUDA's own functions for it take
// the halves apart and put them together again.
#pragma once

#include <cstdint>

namespace moxie::sm90 {

// Of the lower or the upper half of a word.
__device__ inline uint32_t f16x2_of_low_e4m3x2(uint32_t four) {
  uint32_t halves;
  asm("{ .reg .b16 low, high; mov.b32 {low, high}, %1; cvt.rn.f16x2.e4m3x2 %0, low; }"
      : "=r"(halves)
      : "r"(four));
  return halves;
}
__device__ inline uint32_t f16x2_of_high_e4m3x2(uint32_t four) {
  uint32_t halves;
  asm("{ .reg .b16 low, high; mov.b32 {low, high}, %1; cvt.rn.f16x2.e4m3x2 %0, high; }"
      : "=r"(halves)
      : "r"(four));
  return halves;
}

// Of two f16 each, in the order of their columns. Rounds to nearest even and saturates.
__device__ inline uint32_t e4m3x4_of_f16x2(uint32_t first, uint32_t second) {
  uint32_t four;
  asm("{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f16x2 low, %1;"
      " cvt.rn.satfinite.e4m3x2.f16x2 high, %2; mov.b32 %0, {low, high}; }"
      : "=r"(four)
      : "r"(first), "r"(second));
  return four;
}

}  // namespace moxie::sm90
