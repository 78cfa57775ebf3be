// A fragment is the 8 x 8 elements that one thread holds in registers; a tile is 16 x 16 fragments.
// Eight columns of bf16 are one 16-byte load, and eight rows of e4m3 are one 8-byte store into the
// colwise form, so both forms come straight out of registers. Half a warp covers one row of a tile,
// so its accesses are whole lines of memory.
#pragma once

#include "moxie/core/format/bf16.cuh"
#include "moxie/core/ptx/e4m3_convert.cuh"
#include "moxie/core/tile/amax.cuh"

namespace moxie::cuda {

// Unpacks eight elements of bf16, or of f32.
__device__ inline void to_floats(const uint32_t (&word)[kFragment / 2], float (&x)[kFragment]) {
#pragma unroll
  for (int j = 0; j < kFragment; j += 2) {
    x[j] = std::bit_cast<float>(word[j / 2] << 16);
    x[j + 1] = std::bit_cast<float>(word[j / 2] & 0xffff0000u);
  }
}
__device__ inline void to_floats(const uint32_t (&word)[kFragment], float (&x)[kFragment]) {
#pragma unroll
  for (int j = 0; j < kFragment; ++j) x[j] = std::bit_cast<float>(word[j]);
}

// Packs eight elements, rounded to bf16 or as f32.
__device__ inline void to_words(const float (&x)[kFragment], uint32_t (&word)[kFragment / 2]) {
#pragma unroll
  for (int j = 0; j < kFragment; j += 2) word[j / 2] = to_bf16_pair(x[j], x[j + 1]);
}
__device__ inline void to_words(const float (&x)[kFragment], uint32_t (&word)[kFragment]) {
#pragma unroll
  for (int j = 0; j < kFragment; ++j) word[j] = std::bit_cast<uint32_t>(x[j]);
}

template <class T>
struct Fragment;

template <>
struct Fragment<bf16> {
  using AmaxElement = bf16;
  uint32_t word[kFragment][kFragment / 2];

  __device__ void prepare() {}
  // by_row() gives row i times the inverse scale of that row, by_column() row i times those of its
  // columns.
  __device__ void by_row(int i, const Scales<bf16>& scales, float (&x)[kFragment]) const {
    const uint32_t both = __byte_perm(scales.inverse[i / 2], 0, i % 2 ? 0x3232 : 0x1010);
    uint32_t scaled[kFragment / 2];
#pragma unroll
    for (int j = 0; j < kFragment / 2; ++j) scaled[j] = multiply_pairs(word[i][j], both);
    to_floats(scaled, x);
  }
  __device__ void by_column(int i, const Scales<bf16>& scales, float (&x)[kFragment]) const {
    uint32_t scaled[kFragment / 2];
#pragma unroll
    for (int j = 0; j < kFragment / 2; ++j)
      scaled[j] = multiply_pairs(word[i][j], scales.inverse[j]);
    to_floats(scaled, x);
  }
  __device__ void row(int i, float (&x)[kFragment]) const { to_floats(word[i], x); }
  __device__ Amax<bf16> columns() const {
    Amax<bf16> amax;
#pragma unroll
    for (int j = 0; j < kFragment / 2; ++j) {
      amax.word[j] = Amax<bf16>::max_of(word[0][j], word[1][j]);
#pragma unroll
      for (int i = 2; i < kFragment; ++i)
        amax.word[j] = Amax<bf16>::max_of(amax.word[j], word[i][j]);
    }
    return amax;
  }
  __device__ Amax<bf16> rows() const {
    // One word: the amax of the row's even columns, and that of its odd columns.
    const auto of_row = [](const uint32_t(&x)[kFragment / 2]) {
      return Amax<bf16>::max_of(Amax<bf16>::max_of(x[0], x[1]), Amax<bf16>::max_of(x[2], x[3]));
    };
    Amax<bf16> amax;
#pragma unroll
    for (int i = 0; i < kFragment; i += 2) {
      const uint32_t a = of_row(word[i]), b = of_row(word[i + 1]);
      amax.word[i / 2] = Amax<bf16>::max_of(__byte_perm(a, b, 0x5410), __byte_perm(a, b, 0x7632));
    }
    return amax;
  }
};

// Base of fragments whose rows are read as f32 (CRTP: Self has row()).
template <class Self>
struct FloatRows {
  using AmaxElement = float;
  __device__ void prepare() {}
  __device__ void by_row(int i, const Scales<float>& scales, float (&x)[kFragment]) const {
    static_cast<const Self*>(this)->row(i, x);
#pragma unroll
    for (int j = 0; j < kFragment; ++j) x[j] *= scales.inverse[i];
  }
  __device__ void by_column(int i, const Scales<float>& scales, float (&x)[kFragment]) const {
    static_cast<const Self*>(this)->row(i, x);
#pragma unroll
    for (int j = 0; j < kFragment; ++j) x[j] *= scales.inverse[j];
  }
  __device__ Amax<float> columns() const {
    Amax<float> amax{};
#pragma unroll
    for (int i = 0; i < kFragment; ++i) {
      float x[kFragment];
      static_cast<const Self*>(this)->row(i, x);
#pragma unroll
      for (int j = 0; j < kFragment; ++j)
        amax.word[j] = Amax<float>::max_of(amax.word[j], std::bit_cast<uint32_t>(x[j]));
    }
    return amax;
  }
  __device__ Amax<float> rows() const {
    Amax<float> amax{};
#pragma unroll
    for (int i = 0; i < kFragment; ++i) {
      float x[kFragment];
      static_cast<const Self*>(this)->row(i, x);
#pragma unroll
      for (int j = 0; j < kFragment; ++j)
        amax.word[i] = Amax<float>::max_of(amax.word[i], std::bit_cast<uint32_t>(x[j]));
    }
    return amax;
  }
};

template <>
struct Fragment<float> : FloatRows<Fragment<float>> {
  uint32_t word[kFragment][kFragment];

  __device__ void row(int i, float (&x)[kFragment]) const { to_floats(word[i], x); }
};

// A fragment of e4m3 with a scale per row. Scaled values have four significant bits, so bf16 holds
// them exactly. So does f16, in units of the largest row scale, if the smallest row scale is at
// most 2^14 times smaller: then `exact` is true, as for nearly all real tensors.
template <>
struct Fragment<e4m3> {
  using AmaxElement = bf16;
  uint32_t word[kFragment][kFragment / 4];
  // The scale codes of two rows. Four neighbouring lanes need the same scales, because they have
  // the same rows and a rowwise block has at least 32 columns. So each lane loads those of rows 2 i
  // and 2 i + 1, i = lane % 4. Two bytes, not one word, so that no load waits for the other.
  uint8_t loaded[2];
  uint32_t code[kFragment / 2];  // each word has the codes of two rows, in 16 bits each
  uint32_t unit;                 // the largest code
  bool exact;
  // Written by columns() for the transpose: f16 in units of the largest scale if `exact`, else a
  // copy of `word`. One array for both, to save registers.
  uint32_t half[kFragment][kFragment / 2];

  __device__ void share_codes() {
    const int lane = lane_index(), first = lane & ~3;  // of the four lanes
    const uint32_t mine = loaded[0] | static_cast<uint32_t>(loaded[1]) << 16;
    code[0] = __shfl_sync(~0u, mine, first);
    code[1] = __shfl_sync(~0u, mine, first | 1);
    code[2] = __shfl_sync(~0u, mine, first | 2);
    code[3] = __shfl_sync(~0u, mine, lane | 3);
  }
  __device__ uint32_t code_of_row(int i) const { return (code[i / 2] >> (16 * (i % 2))) & 0xff; }

  __device__ void row(int i, float (&x)[kFragment]) const { row(i, word[i][0], word[i][1], x); }
  __device__ void row(int i, uint32_t first, uint32_t second, float (&x)[kFragment]) const {
    ptx::decode4(first, x);
    ptx::decode4(second, x + 4);
    const float scale = factor_of(code_of_row(i));
#pragma unroll
    for (int j = 0; j < kFragment; ++j) x[j] *= scale;
  }
  // Row i times the inverse scales of its columns, if factors() returned false. Call it after
  // columns(), which fills `half`.
  __device__ void by_column(int i, const Scales<bf16>& scales, float (&x)[kFragment]) const {
    float inverse[kFragment];
    to_floats(scales.inverse, inverse);
    if (exact) {
      const float scale = factor_of(unit);
#pragma unroll
      for (int j = 0; j < kFragment; j += 2) {
        const float2 two = floats_of_f16_pair(half[i][j / 2]);
        x[j] = two.x * scale;
        x[j + 1] = two.y * scale;
      }
    } else {
      row(i, half[i][0], half[i][1], x);
    }
#pragma unroll
    for (int j = 0; j < kFragment; ++j) x[j] *= inverse[j];
  }

  __device__ void prepare() {
    share_codes();
    find_unit();
  }
  // Finds the largest code, and whether f16 holds all values exactly in units of its scale. It does
  // if no code is more than 14 below: f16 has exponents enough for that and for the magnitudes of
  // e4m3.
  __device__ void find_unit() {
    const uint32_t most = __vmaxu2(__vmaxu2(code[0], code[1]), __vmaxu2(code[2], code[3])),
                   few = __vminu2(__vminu2(code[0], code[1]), __vminu2(code[2], code[3]));
    unit = max(most & 0xffff, most >> 16);
    exact = unit < kE8m0Nan;
    if (unit - min(few & 0xffff, few >> 16) <= 14) return;
#pragma unroll
    for (int i = 0; i < kFragment; ++i) {
      if (unit - code_of_row(i) <= 14) continue;
      exact = exact && !((word[i][0] | word[i][1]) & 0x7f7f7f7fu);
      if (!exact) continue;
      // The row is all zeros, so its scale does not matter: use the smallest that f16 can hold.
      const int shift = 16 * (i % 2);
      code[i / 2] = (code[i / 2] & ~(0xffffu << shift)) | (unit - 14) << shift;
    }
  }
  static constexpr uint32_t kOne = 0x04000400u;  // adds 1 to the exponents of two packed f16

  __device__ Amax<bf16> columns() {
    Amax<bf16> amax;
    if (exact) {
      const float scale = factor_of(unit);
#pragma unroll
      for (int i = 0; i < kFragment; ++i) {
        const uint32_t both = __byte_perm(code[i / 2], 0, i % 2 ? 0x3232 : 0x1010);
        const uint32_t factor = both * 1024u + (15u - unit) * kOne;  // f16 2^(code - unit), packed
#pragma unroll
        for (int j = 0; j < kFragment / 2; ++j)
          half[i][j] = multiply_f16_pairs(ptx::decode_pair(word[i][j / 2], j % 2), factor);
      }
#pragma unroll
      for (int j = 0; j < kFragment / 2; ++j) {
        uint32_t most = half[0][j];
#pragma unroll
        for (int i = 1; i < kFragment; ++i) most = ptx::max_magnitude_f16x2(most, half[i][j]);
        const float2 two = floats_of_f16_pair(most);
        amax.word[j] = __byte_perm(std::bit_cast<uint32_t>(two.x * scale),
                                   std::bit_cast<uint32_t>(two.y * scale), 0x7632);
      }
    } else {
#pragma unroll
      for (uint32_t& two : amax.word) two = 0;
#pragma unroll
      for (int i = 0; i < kFragment; ++i) {
        float x[kFragment];
        row(i, x);
#pragma unroll
        for (int j = 0; j < kFragment; j += 2)
          amax.word[j / 2] = Amax<bf16>::max_of(
              amax.word[j / 2], __byte_perm(std::bit_cast<uint32_t>(x[j]),
                                            std::bit_cast<uint32_t>(x[j + 1]), 0x7632));
        half[i][0] = word[i][0];
        half[i][1] = word[i][1];
      }
    }
    return amax;
  }

  // Writes the f16 factors, two per word, that scale `half` to the range of e4m3. Returns false if
  // `half` does not hold f16 or if f16 does not have such powers of two.
  __device__ bool factors(const Scales<bf16>& scales, uint32_t (&factor)[kFragment / 2]) const {
    // The exponent field of a bf16 inverse is 254 - code (255 for NaN). That of the f16 factor is
    // 15 + unit - code, which must be 1 to 30.
    const int less = 239 - static_cast<int>(unit);
    const uint32_t low = max(less + 1, 0) * 0x10001u, high = min(less + 30, 254) * 0x10001u;
    uint32_t least = high, most = low;
#pragma unroll
    for (int j = 0; j < kFragment / 2; ++j) {
      const uint32_t exponent = (scales.inverse[j] >> 7) & 0x00ff00ffu;
      least = __vminu2(least, exponent);
      most = __vmaxu2(most, exponent);
      factor[j] = (exponent << 10) - less * kOne;
    }
    return exact && __vmaxu2(least, low) == least && __vminu2(most, high) == most;
  }
};

}  // namespace moxie::cuda
