// Four e4m3 at a time, with the conversion instructions of sm_89 and later.
#pragma once

#include <cuda_fp8.h>

#include <bit>
#include <cstdint>

#include "moxie/core/format/bf16.h"
#include "moxie/core/format/e4m3.h"

namespace moxie::cuda {

// What a thread moves at once: four e4m3 are one 32-bit store.
inline constexpr int kChunk = 4;

template <class T>
struct alignas(kChunk * sizeof(T)) Chunk {
  T value[kChunk];
};

// NaN is written as 0x7f here; other values are rounded as to_e4m3() does. NaN has no other way
// into a result: a block that holds one has the inverse NaN.
__device__ inline Chunk<e4m3> encode(const Chunk<float>& x, float inverse) {
  if (inverse != inverse) return std::bit_cast<Chunk<e4m3>>(0x01010101u * kE4m3Nan);
  const auto [a, b, c, d] = x.value;
  const uint32_t low = __nv_cvt_float2_to_fp8x2({a * inverse, b * inverse}, __NV_SATFINITE, __NV_E4M3);
  const uint32_t high =
      __nv_cvt_float2_to_fp8x2({c * inverse, d * inverse}, __NV_SATFINITE, __NV_E4M3);
  return std::bit_cast<Chunk<e4m3>>(low | high << 16);
}

// Exact, NaN stays NaN.
__device__ inline Chunk<float> decode(const Chunk<e4m3>& qdata) {
  const auto word = std::bit_cast<uint32_t>(qdata);
  const auto two = [](uint32_t pair) {
    return __half22float2(__nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(pair), __NV_E4M3));
  };
  const float2 low = two(word & 0xffff), high = two(word >> 16);
  return {{low.x, low.y, high.x, high.y}};
}

__device__ inline Chunk<float> to_floats(const Chunk<bf16>& x) {
  const auto [a, b, c, d] = x.value;
  return {{to_float(a), to_float(b), to_float(c), to_float(d)}};
}
__device__ inline Chunk<float> to_floats(const Chunk<float>& x) { return x; }

}  // namespace moxie::cuda
