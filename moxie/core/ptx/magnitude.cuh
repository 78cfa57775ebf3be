// The maximum of two magnitudes, NaN if one is NaN. One instruction does it, which takes the
// absolute values of its arguments. The sign of the result is undefined; callers that need the
// magnitude clear it. Before sm_86 the bits are compared as integers: a larger magnitude has larger
// bits, and NaN has the largest.
#pragma once

#include <bit>
#include <cstdint>

#include "moxie/core/ptx/target.cuh"

namespace moxie::ptx {

__device__ inline uint32_t max_magnitude(uint32_t a, uint32_t b) {
  if constexpr (kHasMaxMagnitude) {
    float most;
    asm("max.NaN.xorsign.abs.f32 %0, %1, %2;"
        : "=f"(most)
        : "f"(std::bit_cast<float>(a)), "f"(std::bit_cast<float>(b)));
    return std::bit_cast<uint32_t>(most);
  } else {
    return max(a & 0x7fffffffu, b & 0x7fffffffu);
  }
}

// Maximum of packed pairs; works for any 16-bit format.
__device__ inline uint32_t max_magnitude_by_integers_x2(uint32_t a, uint32_t b) {
  return __vmaxu2(a & 0x7fff7fffu, b & 0x7fff7fffu);
}

__device__ inline uint32_t max_magnitude_bf16x2(uint32_t a, uint32_t b) {
  if constexpr (kHasMaxMagnitude) {
    uint32_t most;
    asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(most) : "r"(a), "r"(b));
    return most;
  } else {
    return max_magnitude_by_integers_x2(a, b);
  }
}

__device__ inline uint32_t max_magnitude_f16x2(uint32_t a, uint32_t b) {
  if constexpr (kHasMaxMagnitude) {
    uint32_t most;
    asm("max.NaN.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(most) : "r"(a), "r"(b));
    return most;
  } else {
    return max_magnitude_by_integers_x2(a, b);
  }
}

}  // namespace moxie::ptx
