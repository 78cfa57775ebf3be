// Two f16 packed in a word, the first in the lower half.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

namespace moxie::cuda {

__device__ inline uint32_t multiply_f16_pairs(uint32_t a, uint32_t b) {
  const __half2 product =
      __hmul2(*reinterpret_cast<const __half2*>(&a), *reinterpret_cast<const __half2*>(&b));
  return *reinterpret_cast<const uint32_t*>(&product);
}

__device__ inline float2 floats_of_f16_pair(uint32_t pair) {
  return __half22float2(*reinterpret_cast<const __half2*>(&pair));
}

}  // namespace moxie::cuda
