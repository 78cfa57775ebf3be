// Four e4m3 at a time, with the conversion instructions of sm_89 and later.
#pragma once

#include <cuda_fp8.h>

#include <bit>
#include <cstdint>

#include "moxie/core/format/bf16.h"
#include "moxie/core/format/e4m3.h"

namespace moxie::cuda {

inline constexpr int kChunk = 4;  // what a thread moves at once: four e4m3 are one 32-bit word

template <class T>
struct alignas(kChunk * sizeof(T)) Chunk {
  T value[kChunk];
};

using E4m3Word = uint32_t;  // four e4m3, the first in the lowest byte

// Rounds as to_e4m3() does. NaN never comes from x alone: a block that holds one has a NaN inverse.
__device__ inline E4m3Word encode(const Chunk<float>& x, float inverse) {
  if (inverse != inverse) return 0x01010101u * kE4m3Nan;
  const auto two = [inverse](float a, float b) -> uint32_t {
    return __nv_cvt_float2_to_fp8x2({a * inverse, b * inverse}, __NV_SATFINITE, __NV_E4M3);
  };
  return two(x.value[0], x.value[1]) | two(x.value[2], x.value[3]) << 16;
}

// Exact; NaN stays NaN, with whatever sign.
__device__ inline Chunk<float> decode(E4m3Word word) {
  const auto two = [](uint32_t pair) {
    const auto codes = static_cast<__nv_fp8x2_storage_t>(pair & 0xffff);
    return __half22float2(__nv_cvt_fp8x2_to_halfraw2(codes, __NV_E4M3));
  };
  const float2 low = two(word), high = two(word >> 16);
  return {{low.x, low.y, high.x, high.y}};
}

__device__ inline Chunk<float> to_floats(const Chunk<float>& x) { return x; }
__device__ inline Chunk<float> to_floats(const Chunk<bf16>& x) {
  Chunk<float> out;
#pragma unroll
  for (int i = 0; i < kChunk; ++i) out.value[i] = to_float(x.value[i]);
  return out;
}

template <class T>
__device__ Chunk<T> from_floats(const Chunk<float>& x) {
  if constexpr (sizeof(T) == sizeof(float)) {
    return x;
  } else {
    Chunk<bf16> out;
#pragma unroll
    for (int i = 0; i < kChunk; ++i) out.value[i] = to_bf16(x.value[i]);
    return out;
  }
}

}  // namespace moxie::cuda
