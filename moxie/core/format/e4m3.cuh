// e4m3 conversions without conversion instructions, for GPUs that have none; the bits are the same.
#pragma once

#include <cstdint>

#include "moxie/core/format/e4m3.h"
#include "moxie/core/format/f16.cuh"

namespace moxie::cuda {

// Encodes two floats in the lower half of a word, `a` in the lower byte.
__device__ inline uint32_t encode2_by_integers(float a, float b) {
  return uint32_t{to_e4m3(a).bits} | uint32_t{to_e4m3(b).bits} << 8;
}

// Bytes 2 i and 2 i + 1 of a word as two f16. Exponent and mantissa are shifted to their places in
// an f16, whose bias is larger by 8; the product with 2^8 is exact and normalizes subnormals. NaN
// must be handled apart, as it would become 480.
__device__ inline uint32_t decode2_by_integers(uint32_t word, int i) {
  const uint32_t bytes = __byte_perm(word, 0, i ? 0x3424 : 0x1404);  // upper bytes of the halves
  const uint32_t magnitude = (bytes & 0x7f007f00u) >> 1;
  const uint32_t nan = __vcmpeq2(magnitude, 0x3f803f80u) & 0x7fff7fffu;
  return multiply_f16_pairs(magnitude | (bytes & 0x80008000u), 0x5c005c00u) | nan;
}

}  // namespace moxie::cuda
