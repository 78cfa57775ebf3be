// wgrad: the scales of one consumer thread, in its registers. Loads are issued a quad of steps
// ahead.
#pragma once

#include "moxie/core/gemm/scales.cuh"

namespace moxie::sm90 {

// The codes of one row, four at a time, from any byte on.
class LaneCodes {
 public:
  __device__ void start(const ScaleMatrix& scale, int64_t row, int k_begin) {
    const uint8_t* first = codes_of(scale, row, k_begin);
    const auto misaligned = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(first) % kQuad);
    shift_ = 8 * misaligned;
    at_ = first - misaligned;
    low_ = word(scale, at_);
    advance(scale);
  }
  __device__ uint32_t codes() const { return __funnelshift_r(low_, high_, shift_); }
  // Loads the word after the next; codes() is then the next quad.
  __device__ void turn(const ScaleMatrix& scale) {
    low_ = high_;
    advance(scale);
  }

 private:
  static __device__ uint32_t word(const ScaleMatrix& scale, const uint8_t* at) {
    const uint8_t* end = scale.end;
    if (__builtin_expect(at >= scale.data && at + kQuad <= end, true))
      return __ldg(reinterpret_cast<const uint32_t*>(at));
    return codes_inside<kQuad>(scale, at);
  }
  __device__ void advance(const ScaleMatrix& scale) {
    at_ += kQuad;
    high_ = word(scale, at_);
  }

  const uint8_t* at_;
  uint32_t shift_, low_, high_;
};

// Of a: the thread's two rows of each wave. Of b: one for each span of 32 columns. Words of codes
// that are not wild are added as they are, four steps at a time.
template <class Tile>
class LaneScales {
 public:
  static constexpr int kSpan = 32, kSpans = kTileN / kSpan;
  using Factors = float[2][kSpans];

  __device__ explicit LaneScales(const GemmParams& p) : p_(p) {}

  // The four lanes that hold the same rows share their loads: each takes one row's codes.
  __device__ void start(const Work& work) {
    const int mine = cuda::lane_index() % 4;
    const int row = Rows<Tile>::of_thread(mine / 2 % Tile::kWaves) + mine % 2 * 8;
    a_.start(p_.scale_a, work.row + row, work.k_begin);
    b_.start(p_.scale_b, b_code_row(p_, work, kSpan) + mine, work.k_begin);
    // Rows that are not stored may hold anything; they need not be slow.
    a_counts_ = row < work.rows ? kTop : 0;
  }

  // Takes the codes of the next four steps, of which `left` exist.
  __device__ void take(int left) {
    const uint32_t a = a_.codes(), b = b_.codes();
    // Code 191 of a is not too much beside those of b that are not wild.
    const uint32_t wild = ((a - k64) & a_counts_) | (top_if_wild(b) & kTop);
    wild_ = __any_sync(~0u, wild & bytes_of_steps(left));
    const int base = cuda::lane_index() & ~3;
#pragma unroll
    for (int j = 0; j < kSpans; ++j) b_words_[j] = to_exponent(__shfl_sync(~0u, b, j) - k63);
#pragma unroll
    for (int i = 0; i < 2 * Tile::kWaves; ++i)
      a_words_[i] = to_exponent(__shfl_sync(~0u, a, base + i) - k64);
  }
  __device__ void turn() {
    a_.turn(p_.scale_a);
    b_.turn(p_.scale_b);
  }

  __device__ bool wild() const { return wild_; }

  // Of this step, not wild: for the first and second row of a wave and each span.
  __device__ __forceinline__ void factors(int wave, Factors& factors) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t a = a_words_[2 * wave + half] & kExponent;
#pragma unroll
      for (int j = 0; j < kSpans; ++j)
        factors[half][j] = __uint_as_float(a + (b_words_[j] & kExponent));
    }
  }
  __device__ __forceinline__ void step() {
#pragma unroll
    for (uint32_t& word : a_words_) word = __funnelshift_r(word, word, 8);
#pragma unroll
    for (uint32_t& word : b_words_) word = __funnelshift_r(word, word, 8);
  }

  // The same for any codes, which are read again.
  __device__ float2 wild_factors(const Work& work, int step, int wave, int half, int j) const {
    const int k = work.k_begin + step, row = Rows<Tile>::of_thread(wave) + half * 8;
    return sm90::wild_factors(*codes_of(p_.scale_a, work.row + row, k),
                              *codes_of(p_.scale_b, b_code_row(p_, work, kSpan) + j, k));
  }

 private:
  static constexpr uint32_t kExponent = 0x7f800000;

  // Moves the lowest byte to where an f32 has its exponent.
  static __device__ uint32_t to_exponent(uint32_t word) { return __funnelshift_l(word, word, 23); }

  const GemmParams& p_;
  LaneCodes a_, b_;
  uint32_t a_counts_ = 0;
  uint32_t a_words_[2 * Tile::kWaves], b_words_[kSpans];
  bool wild_ = false;
};

}  // namespace moxie::sm90
