// The scales of one consumer thread. Plain scales lie along k, so one aligned 4-byte load has those
// of four steps; it is issued a quad of steps ahead.
#pragma once

#include "moxie/core/base/cuda.cuh"
#include "moxie/core/format/e8m0.h"
#include "moxie/core/gemm/tile.cuh"

namespace moxie::sm90 {

inline constexpr int kQuad = 4;  // codes in a word

// The aligned word at `at`, of which only the bytes inside the matrix are read.
__device__ inline uint32_t load_codes(const ScaleMatrix& scale, const uint8_t* at) {
  const uint8_t* end = scale.end;
  if (__builtin_expect(at >= scale.data && at + kQuad <= end, true))
    return __ldg(reinterpret_cast<const uint32_t*>(at));
  uint32_t codes = 0;
  for (int i = 0; i < kQuad; ++i)
    if (at + i >= scale.data && at + i < end) codes |= uint32_t{at[i]} << (8 * i);
  return codes;
}

// Where the codes of a row begin. Rows past the last are those of the last: they are not used.
__device__ inline const uint8_t* codes_of(const ScaleMatrix& scale, int64_t row, int k_begin) {
  return scale.data + min<int64_t>(row, scale.rows - 1) * scale.stride + k_begin;
}

// The codes of one row, four at a time, from any byte on.
class CodeStream {
 public:
  __device__ void start(const ScaleMatrix& scale, int64_t row, int k_begin) {
    const uint8_t* first = codes_of(scale, row, k_begin);
    const auto misaligned = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(first) % kQuad);
    shift_ = 8 * misaligned;
    at_ = first - misaligned;
    low_ = load_codes(scale, at_);
    advance(scale);
  }
  __device__ uint32_t codes() const { return __funnelshift_r(low_, high_, shift_); }
  // Loads the word after the next; codes() is then the next quad.
  __device__ void turn(const ScaleMatrix& scale) {
    low_ = high_;
    advance(scale);
  }

 private:
  __device__ void advance(const ScaleMatrix& scale) {
    at_ += kQuad;
    high_ = load_codes(scale, at_);
  }

  const uint8_t* at_;
  uint32_t shift_, low_, high_;
};

// 2^exponent for exponents in [-127, 127].
__device__ inline float power_of_two(int exponent) {
  return to_float(e8m0{static_cast<uint8_t>(exponent + 127)});
}

// Rows of the tile in a wave: the first of the 16 of this warp, and the first of the two of this
// thread, the other being 8 below.
template <class Tile>
struct Rows {
  static __device__ int of_warp(int wave) {
    const int warp = cuda::warp_index();
    return (wave * kConsumers + warp / 4) * kWgmmaM + warp % 4 * 16;
  }
  static __device__ int of_thread(int wave) { return of_warp(wave) + cuda::lane_index() / 4; }
};

// A thread's scales of a: its two rows of each wave. Of b: one per 128 columns (kRows) or four, one
// per 32 (kDepth).
//
// The product of two scales has the sum of their exponents. Codes in [64, 190] (2^-63 to 2^63)
// give a sum that is the exponent of a normal f32, so words of codes are added as they are, four
// steps at a time. Everything else, NaN among it, is `wild` and takes a slower way.
template <Ragged kRagged, class Tile>
class Scales {
 public:
  static constexpr int kColumns = kRagged == Ragged::kRows ? 1 : 4;
  static constexpr int kPerColumn = 64 / kColumns;  // accumulators of a wave that share one
  using Factors = float[2][kColumns];

  __device__ explicit Scales(const GemmParams& p) : p_(p) {}

  // The four lanes that hold the same rows share their loads: each takes one row's codes.
  __device__ void start(const Work& work) {
    const int mine = cuda::lane_index() % 4;
    const int row = Rows<Tile>::of_thread(mine / 2 % Tile::kWaves) + mine % 2 * 8;
    a_.start(p_.scale_a, work.row + row, work.k_begin);
    const int b_row = work.group * p_.b_scales_of_group + work.col / (kTileN / kColumns);
    b_.start(p_.scale_b, b_row + mine % kColumns, work.k_begin);
    // Rows that are not stored may hold anything; they need not be slow.
    a_counts_ = row < work.rows ? kTop : 0;
  }

  // Takes the codes of the next four steps, of which `left` exist.
  __device__ void take(int left) {
    constexpr uint32_t k63 = 0x3f3f3f3f, k64 = 0x40404040;
    const uint32_t a = a_.codes(), b = b_.codes();
    const uint32_t counts = left < kQuad ? (1u << (8 * left)) - 1 : ~0u;
    // A byte below the subtrahend or 128 above it ends with its top bit set. What it borrows from
    // the byte above can only set bits there.
    const uint32_t outside = ((a - k64) & a_counts_) | (((b - k64) | (b - k63)) & kTop);
    wild_ = __any_sync(~0u, outside & counts);
    const int base = cuda::lane_index() & ~3;
#pragma unroll
    for (int j = 0; j < kColumns; ++j) b_words_[j] = to_top(__shfl_sync(~0u, b, j) - k63);
#pragma unroll
    for (int i = 0; i < 2 * Tile::kWaves; ++i) {
      a_words_[i] = __shfl_sync(~0u, a, base + i) - k64;
      if constexpr (kColumns == 1) a_words_[i] += b - k63;
      a_words_[i] = to_top(a_words_[i]);
    }
  }
  __device__ void turn() {
    a_.turn(p_.scale_a);
    b_.turn(p_.scale_b);
  }

  __device__ bool wild() const { return wild_; }

  // Of this step, not wild: for the first and second row of a wave and each column of scales.
  __device__ __forceinline__ void factors(int wave, Factors& factors) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t a = a_words_[2 * wave + half] & kExponent;
#pragma unroll
      for (int j = 0; j < kColumns; ++j)
        factors[half][j] = __uint_as_float(kColumns == 1 ? a : a + (b_words_[j] & kExponent));
    }
  }
  __device__ __forceinline__ void step() {
#pragma unroll
    for (uint32_t& word : a_words_) word = __funnelshift_r(word, word, 8);
    if constexpr (kColumns > 1) {
#pragma unroll
      for (uint32_t& word : b_words_) word = __funnelshift_r(word, word, 8);
    }
  }

  // The same for any codes, as two factors, neither of which overflows or vanishes: a value is
  // multiplied with one after the other.
  __device__ float2 wild_scale(const Work& work, int step, int wave, int half, int j) const {
    const int k = work.k_begin + step;
    const int b_row = work.group * p_.b_scales_of_group + work.col / (kTileN / kColumns) + j;
    const int a = *codes_of(p_.scale_a, work.row + Rows<Tile>::of_thread(wave) + half * 8, k);
    const int b = *codes_of(p_.scale_b, b_row, k);
    const int exponent = a + b - 254;
    const int first = exponent >> 1;
    const bool nan = a == kE8m0Nan || b == kE8m0Nan;
    return {nan ? to_float(e8m0{kE8m0Nan}) : power_of_two(first), power_of_two(exponent - first)};
  }

 private:
  static constexpr uint32_t kTop = 0x80808080, kExponent = 0x7f800000;

  // Moves the lowest byte to where the exponent of an f32 is.
  static __device__ uint32_t to_top(uint32_t word) { return __funnelshift_l(word, word, 23); }

  const GemmParams& p_;
  CodeStream a_, b_;
  uint32_t a_counts_ = 0;
  uint32_t a_words_[2 * Tile::kWaves], b_words_[kColumns];
  bool wild_ = false;
};

}  // namespace moxie::sm90
