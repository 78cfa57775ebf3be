// Converts e4m3 in registers: on sm_89 and later with conversion instructions, before that with
// integer arithmetic.
#pragma once

#include <cuda_fp8.h>

#include <cstdint>

#include "moxie/core/format/e4m3.cuh"
#include "moxie/core/format/f16.cuh"
#include "moxie/core/ptx/target.cuh"

namespace moxie::ptx {

// ---- conversion instructions of sm_89 and later, two e4m3 <-> two f16. CUDA's own functions for
// them unpack and repack the halves, which costs instructions ----

// Decodes the lower, or the upper, two bytes of a word.
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

// Encodes two words of two f16 each as four e4m3, in order. Rounds to nearest even and saturates.
__device__ inline uint32_t e4m3x4_of_f16x2(uint32_t first, uint32_t second) {
  uint32_t four;
  asm("{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f16x2 low, %1;"
      " cvt.rn.satfinite.e4m3x2.f16x2 high, %2; mov.b32 %0, {low, high}; }"
      : "=r"(four)
      : "r"(first), "r"(second));
  return four;
}

// ---- e4m3 on every GPU ----

using E4m3Word = uint32_t;  // four e4m3, the first in the lowest byte

// Encodes two elements to the lower half of a word. Rounds as to_e4m3() does; NaN becomes 0x7f.
__device__ inline uint32_t encode2(float a, float b) {
  if constexpr (kHasE4m3)
    return __nv_cvt_float2_to_fp8x2({a, b}, __NV_SATFINITE, __NV_E4M3);
  else
    return cuda::encode2_by_integers(a, b);
}

__device__ inline E4m3Word encode4(const float* x) {
  return encode2(x[0], x[1]) | encode2(x[2], x[3]) << 16;
}

// Decodes four elements exactly. NaN stays NaN; its bits are unspecified.
__device__ inline void decode4(E4m3Word word, float* x) {
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    float2 two;
    if constexpr (kHasE4m3) {
      const auto codes = static_cast<__nv_fp8x2_storage_t>(word >> 8 * i & 0xffff);
      two = __half22float2(__nv_cvt_fp8x2_to_halfraw2(codes, __NV_E4M3));
    } else {
      two = cuda::floats_of_f16_pair(cuda::decode2_by_integers(word, i / 2));
    }
    x[i] = two.x, x[i + 1] = two.y;
  }
}

// ---- two elements at a time in f16, which holds every e4m3 exactly ----

__device__ inline uint32_t decode_pair(E4m3Word word, int i) {  // elements 2 i and 2 i + 1
  if constexpr (kHasE4m3)
    return i ? f16x2_of_high_e4m3x2(word) : f16x2_of_low_e4m3x2(word);
  else
    return cuda::decode2_by_integers(word, i);
}

__device__ inline E4m3Word encode_pairs(uint32_t first, uint32_t second) {
  if constexpr (kHasE4m3) {
    return e4m3x4_of_f16x2(first, second);
  } else {
    const float2 a = cuda::floats_of_f16_pair(first), b = cuda::floats_of_f16_pair(second);
    return encode2(a.x, a.y) | encode2(b.x, b.y) << 16;
  }
}

// Transposes 4 x 4 bytes: word i becomes byte i of each word.
__device__ inline void transpose_bytes(E4m3Word (&word)[4]) {
  const uint32_t a = __byte_perm(word[0], word[1], 0x5140),
                 b = __byte_perm(word[2], word[3], 0x5140),
                 c = __byte_perm(word[0], word[1], 0x7362),
                 d = __byte_perm(word[2], word[3], 0x7362);
  word[0] = __byte_perm(a, b, 0x5410), word[1] = __byte_perm(a, b, 0x7632);
  word[2] = __byte_perm(c, d, 0x5410), word[3] = __byte_perm(c, d, 0x7632);
}

}  // namespace moxie::ptx
