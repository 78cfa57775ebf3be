// Scale codes (e8m0 bytes): where they are, which of them the fast path takes, and how the slow
// path multiplies with the others.
#pragma once

#include "moxie/core/base/cuda.cuh"
#include "moxie/core/format/e8m0.h"
#include "moxie/core/gemm/gemm_params.cuh"

namespace moxie::sm90 {

// A row of codes in a stack of scale matrices.
struct CodeRow {
  int matrix, row;

  // Index of the word that holds the code of step k.
  __device__ uint32_t word(const ScaleMatrix& scale, int k) const {
    return (matrix * scale.quads + k / kQuad) * scale.rows + row;
  }
};

// The scale row of b for span `span` (kSpan columns) of this tile.
template <class Tile>
__device__ __forceinline__ CodeRow b_code_row(const GemmParams& p, const Work& work, int span) {
  const int matrix = Tile::kRagged == Ragged::kRows ? work.group : 0;
  return {matrix, work.col / Tile::kSpan + span};
}

// One code. A row past the end reads the last row's code, because its results are not stored.
__device__ inline int code_at(const ScaleMatrix& scale, CodeRow at, int k) {
  at.row = min(at.row, static_cast<int>(scale.rows) - 1);
  return (__ldg(scale.words + at.word(scale, k)) >> (k % kQuad * 8)) & 0xff;
}

// Multiplying two scales adds their exponents. The product of two codes in [64, 190] (2^-63 to
// 2^63) is a normal f32, so its exponent field is a sum of codes less 127. All other codes, NaN
// included, are "wild" and take the slow path.
//
// Four codes are tested at once, as packed bytes: after a subtraction, the top bit of a byte is set
// if the byte was below the subtrahend or at least 128 above it. A borrow may clear the top bit of
// the byte above it, but then the borrowing byte has its own set, and the word still counts as
// wild. The constants add up to 127: (a - 0x40) + (b - 0x3f) is the exponent field of the product.
inline constexpr uint32_t kBelowTame = 0x3f3f3f3f, kLowestTame = 0x40404040, kTopBits = 0x80808080;
__device__ __forceinline__ uint32_t top_if_wild(uint32_t codes) {
  return (codes - kLowestTame) | (codes - kBelowTame);
}

// Mask of the bytes of the first `left` of four steps.
__device__ __forceinline__ uint32_t bytes_of_steps(int left) {
  return left < kQuad ? (1u << (8 * left)) - 1 : ~0u;
}

// Bits of the f32 2^exponent, for exponents in [-127, 127], or of NaN; branch-free.
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

// The product of any two scales as two factors to multiply with in turn, so that neither factor
// overflows or underflows.
__device__ inline float2 wild_factors(int a, int b) {
  const int exponent = a + b - 254, first = exponent >> 1;
  const bool nan = a == kE8m0Nan || b == kE8m0Nan;
  return {__uint_as_float(power_bits(nan ? 0 : first, nan)),
          __uint_as_float(power_bits(nan ? 0 : exponent - first))};
}

// Rows of the tile: a warp's first row of 16, and a thread's first row of two (the second is 8
// rows below).
struct Rows {
  static __device__ int of_warp() { return cuda::warp_index() * 16; }
  static __device__ int of_thread() { return of_warp() + cuda::lane_index() / 4; }
};

}  // namespace moxie::sm90
