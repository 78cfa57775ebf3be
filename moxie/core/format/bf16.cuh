// Two bf16 packed in a word, the first in the lower half.
#pragma once

#include <cuda_bf16.h>

#include <bit>
#include <cstdint>

#include "moxie/core/base/math.h"
#include "moxie/core/format/bf16.h"

namespace moxie::cuda {

__device__ inline uint32_t multiply_pairs(uint32_t a, uint32_t b) {
  const __nv_bfloat162 product = __hmul2(*reinterpret_cast<const __nv_bfloat162*>(&a),
                                         *reinterpret_cast<const __nv_bfloat162*>(&b));
  return *reinterpret_cast<const uint32_t*>(&product);
}

// Rounds as to_bf16() does, but every NaN becomes 0x7fc0. Seen as a signed integer, the GPU's NaN
// (0x7fff) is larger than every other bf16, so an integer minimum replaces it.
__device__ inline uint32_t to_bf16_pair(float a, float b) {
  const __nv_bfloat162 two = __floats2bfloat162_rn(a, b);
  return __vmins2(*reinterpret_cast<const uint32_t*>(&two), 0x7fc07fc0u);
}
__device__ inline float with_one_nan(float x) {
  return std::bit_cast<float>(min(std::bit_cast<int32_t>(x), 0x7fc00000));
}

}  // namespace moxie::cuda
