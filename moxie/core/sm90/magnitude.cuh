// Maxima of magnitudes in one instruction: absolute values are taken on the way in, and a NaN wins.
// The sign of a result means nothing; whoever needs the magnitude clears it. sm_86 and later.
#pragma once

#include <bit>
#include <cstdint>

namespace moxie::sm90 {

__device__ inline uint32_t max_magnitude(uint32_t a, uint32_t b) {
  float most;
  asm("max.NaN.xorsign.abs.f32 %0, %1, %2;"
      : "=f"(most)
      : "f"(std::bit_cast<float>(a)), "f"(std::bit_cast<float>(b)));
  return std::bit_cast<uint32_t>(most);
}

__device__ inline uint32_t max_magnitude_bf16x2(uint32_t a, uint32_t b) {
  uint32_t most;
  asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(most) : "r"(a), "r"(b));
  return most;
}

__device__ inline uint32_t max_magnitude_f16x2(uint32_t a, uint32_t b) {
  uint32_t most;
  asm("max.NaN.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(most) : "r"(a), "r"(b));
  return most;
}

}  // namespace moxie::sm90
