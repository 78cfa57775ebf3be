// amax of the rows or columns of a fragment, and the scales that follow from it.
#pragma once

#include "moxie/core/base/cuda.cuh"
#include "moxie/core/format/bf16.h"
#include "moxie/core/format/e8m0.cuh"
#include "moxie/core/ptx/magnitude.cuh"
#include "moxie/core/tile/tile_shape.cuh"

namespace moxie::cuda {

// ---- amax as bits: a larger magnitude has larger bits, and NaN has the largest ----

// The amax of each of a fragment's eight rows, or of its eight columns. Sign bits are undefined.
// bf16 packs two in a word.
template <class T>
struct Amax;

template <>
struct Amax<bf16> {
  static constexpr int kWords = kFragment / 2;
  uint32_t word[kWords];

  __device__ static uint32_t max_of(uint32_t a, uint32_t b) {
    return ptx::max_magnitude_bf16x2(a, b);
  }
  __device__ uint32_t bits(int i) const {  // as f32
    return i % 2 ? word[i / 2] & 0x7fff0000u : (word[i / 2] << 16) & 0x7fff0000u;
  }
  __device__ uint32_t overall() const {
    const uint32_t most = max_of(max_of(word[0], word[1]), max_of(word[2], word[3]));
    return max_of(most, __byte_perm(most, 0, 0x1032));  // 0x1032 swaps the halves
  }
};

template <>
struct Amax<float> {
  static constexpr int kWords = kFragment;
  uint32_t word[kWords];

  __device__ static uint32_t max_of(uint32_t a, uint32_t b) { return ptx::max_magnitude(a, b); }
  __device__ uint32_t bits(int i) const { return word[i] & 0x7fffffffu; }
  __device__ uint32_t overall() const {
    uint32_t most = word[0];
#pragma unroll
    for (int i = 1; i < kWords; ++i) most = max_of(most, word[i]);
    return most;
  }
};

template <class T>
__device__ void update_amax(Amax<T>& amax, const Amax<T>& by) {
#pragma unroll
  for (int i = 0; i < Amax<T>::kWords; ++i)
    amax.word[i] = Amax<T>::max_of(amax.word[i], by.word[i]);
}

// Replaces amax by its maximum over the lanes whose indices differ only in bits that kLanes has
// set.
template <int kLanes, class T>
__device__ void amax_over_lanes(Amax<T>& amax) {
#pragma unroll
  for (int step = 1; step < kWarp; step *= 2) {
    if (!(kLanes & step)) continue;
#pragma unroll
    for (int i = 0; i < Amax<T>::kWords; ++i)
      amax.word[i] = Amax<T>::max_of(amax.word[i], __shfl_xor_sync(~0u, amax.word[i], step));
  }
}

// ---- scales: the codes for eight amax, and the inverses, which elements are multiplied with ----

template <class T>
struct Scales;

// Computes two scales at a time, packed in 16-bit halves. Scaling in bf16 loses nothing: a bf16
// times a power of two is exact, or so small that e4m3 rounds it to zero.
template <>
struct Scales<bf16> {
  uint32_t code[2];                 // packed bytes
  uint32_t inverse[kFragment / 2];  // packed bf16

  __device__ Scales(const Amax<bf16>& amax, ScaleChoice choice) {
    const uint32_t round = (choice.round >> 16) * 0x10001u, limit = (choice.limit >> 16) * 0x10001u;
    uint32_t codes[kFragment / 2];
#pragma unroll
    for (int i = 0; i < kFragment / 2; ++i) {
      const uint32_t bits = amax.word[i] & 0x7fff7fffu;
      // code_of (format/e8m0.cuh) on both halves: the exponent, rounded up or not, less that of
      // e4m3's largest power of two (8), and not below 0.
      const uint32_t exponent = ((bits + round) >> 7) & 0x01ff01ffu;
      codes[i] = __vmaxu2(exponent, 0x00080008u) - 0x00080008u;
      inverse[i] = 0x7f007f00u - (codes[i] << 7);  // exponent field 254 - code
      // Halves at or above the limit (inf and NaN) get the NaN code and a NaN inverse.
      if (const uint32_t over = ((bits | 0x80008000u) - limit) & 0x80008000u; over) {
        const uint32_t mask = (over >> 15) * 0xffffu;
        codes[i] = (codes[i] & ~mask) | (mask & 0x00ff00ffu);
        inverse[i] = (inverse[i] & ~mask) | (mask & 0x7fc07fc0u);
      }
    }
    // 0x6420 takes the low byte of each 16-bit half.
    code[0] = __byte_perm(codes[0], codes[1], 0x6420);
    code[1] = __byte_perm(codes[2], codes[3], 0x6420);
  }
};

template <>
struct Scales<float> {
  uint32_t code[2] = {};
  float inverse[kFragment];

  __device__ Scales(const Amax<float>& amax, ScaleChoice choice) {
#pragma unroll
    for (int i = 0; i < kFragment; ++i) {
      const uint32_t one = code_of(amax.bits(i), choice);
      code[i / 4] |= one << 8 * (i % 4);
      inverse[i] = inverse_of(one);
    }
  }
};

}  // namespace moxie::cuda
