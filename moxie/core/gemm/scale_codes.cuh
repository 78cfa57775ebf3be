// Codes of scales: where they are, which of them the usual path can take, and the product of
// others.
#pragma once

#include "moxie/core/base/cuda.cuh"
#include "moxie/core/format/e8m0.h"
#include "moxie/core/gemm/gemm_params.cuh"

namespace moxie::sm90 {

// A row of codes, of a stack of matrices.
struct CodeRow {
  int matrix, row;

  // The word that has its code of step k.
  __device__ uint32_t word(const ScaleMatrix& scale, int k) const {
    return (matrix * scale.quads + k / kQuad) * scale.rows + row;
  }
};

// The row of codes of b that so many spans of a tile's columns are before.
template <class Tile>
__device__ __forceinline__ CodeRow b_code_row(const GemmParams& p, const Work& work, int span) {
  const int matrix = Tile::kRagged == Ragged::kRows ? work.group : 0;
  return {matrix, work.col / Tile::kSpan + span};
}

// One code. Rows past the last are the last: they are not used.
__device__ inline int code_at(const ScaleMatrix& scale, CodeRow at, int k) {
  at.row = min(at.row, static_cast<int>(scale.rows) - 1);
  return __ldg(scale.words + at.word(scale, k)) >> k % kQuad * 8 & 0xff;
}

// The product of two scales has the sum of their exponents. Codes in [64, 190] (2^-63 to 2^63) give
// a sum that is the exponent of a normal f32. Everything else, NaN among it, is wild.
//
// Of four codes at a time: a byte below the subtrahend or 128 above it ends with its top bit set.
// What it borrows may clear that bit in the byte above, but the word has one set then.
// The two constants add up to 127, so that the sum of both differences is the exponent field of the
// product.
inline constexpr uint32_t kBelowTame = 0x3f3f3f3f, kLowestTame = 0x40404040, kTopBits = 0x80808080;
__device__ __forceinline__ uint32_t top_if_wild(uint32_t codes) {
  return (codes - kLowestTame) | (codes - kBelowTame);
}

// The bytes of the first `left` steps.
__device__ __forceinline__ uint32_t bytes_of_steps(int left) {
  return left < kQuad ? (1u << (8 * left)) - 1 : ~0u;
}

// 2^exponent for exponents in [-127, 127], or NaN, without a jump.
constexpr uint32_t power_bits(int exponent, bool nan = false) {
  const uint32_t power = exponent == -127 ? 1u << 22 : static_cast<uint32_t>(exponent + 127) << 23;
  return nan ? 0x7fc00000 : power;
}
constexpr bool is_power_of_e8m0() {
  for (int code = 0; code < kE8m0Nan; ++code)
    if (power_bits(code - 127) !=
        std::bit_cast<uint32_t>(to_float(e8m0{static_cast<uint8_t>(code)})))
      return false;
  return power_bits(0, true) == std::bit_cast<uint32_t>(to_float(e8m0{kE8m0Nan}));
}
static_assert(is_power_of_e8m0());

// The product of any two scales as two factors, neither of which overflows or vanishes: a value is
// multiplied with one after the other.
__device__ inline float2 wild_factors(int a, int b) {
  const int exponent = a + b - 254, first = exponent >> 1;
  const bool nan = a == kE8m0Nan || b == kE8m0Nan;
  return {__uint_as_float(power_bits(nan ? 0 : first, nan)),
          __uint_as_float(power_bits(nan ? 0 : exponent - first))};
}

// Rows of the tile: the first of the 16 of this warp, and the first of the two of this thread, the
// other being 8 below.
struct Rows {
  static __device__ int of_warp() { return cuda::warp_index() * 16; }
  static __device__ int of_thread() { return of_warp() + cuda::lane_index() / 4; }
};

}  // namespace moxie::sm90
