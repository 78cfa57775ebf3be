// Forward and dgrad: two warps find the scales of a step and leave them in shared memory,
// multiplied with b's, beside the operands: a consumer thread has one word to read per step.
#pragma once

#include "moxie/core/gemm/scales.cuh"
#include "moxie/core/gemm/schedule.cuh"

namespace moxie::sm90 {

// The codes of kRows rows, four steps at a time. Rows past the end of the matrix have zeros.
template <int kRows>
class CodeStream {
 public:
  __device__ __forceinline__ void start(const ScaleMatrix& scale, int64_t row) {
    const int64_t byte = scale.data - reinterpret_cast<const uint8_t*>(scale.words);
    first_ = static_cast<uint32_t>(byte + row * scale.stride);
  }
  // Whether all words of so many steps begin with a row's code and lie inside the matrix.
  __device__ __forceinline__ bool is_simple(const ScaleMatrix& scale, int steps) const {
    const uint32_t last = first_ / kQuad + below(scale, kRows - 1) + (steps - 1) / kQuad;
    return first_ % kQuad == 0 && first_ / kQuad >= scale.first_word &&
           last - scale.first_word < scale.num_words;
  }
  // The load of those of step k and the next three is then under way.
  __device__ __forceinline__ void load_simple(const ScaleMatrix& scale, int k) {
    shift_ = 0;
#pragma unroll
    for (int i = 0; i < kRows; ++i) low_[i] = __ldg(scale.words + (first_ + k) / kQuad + below(scale, i));
  }
  __device__ __forceinline__ void load(const ScaleMatrix& scale, int k) {
    const uint32_t byte = first_ + k;
    shift_ = byte % kQuad * 8;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const uint32_t at = byte / kQuad + below(scale, i);
      low_[i] = word(scale, at);
      high_[i] = 0;
      if (shift_ != 0) high_[i] = word(scale, at + 1);
    }
  }
  __device__ __forceinline__ uint32_t codes(int i) const {
    return __funnelshift_r(low_[i], high_[i], shift_);
  }
  // Below the first: pairs of rows 8 apart, and 32 pairs are 64 rows. Multiples of four, so that all
  // rows have the same shift.
  static constexpr __device__ int row(int i) { return i / 2 * 64 + i % 2 * 8; }

 private:
  static __device__ __forceinline__ uint32_t below(const ScaleMatrix& scale, int i) {
    return static_cast<uint32_t>(row(i) / kQuad * scale.stride);
  }
  static __device__ __forceinline__ uint32_t word(const ScaleMatrix& scale, uint32_t at) {
    const uint32_t* word = scale.words + at;
    return at - scale.first_word < scale.num_words
               ? __ldg(word)
               : codes_inside<1>(scale, reinterpret_cast<const uint8_t*>(word));
  }

  uint32_t first_, shift_, low_[kRows], high_[kRows];
};

// Half of the rows, one warp. Lane l has pairs l and l + 32 of StepScales.
template <class Tile>
class Scaler {
 public:
  __device__ Scaler(const GemmParams& p, GemmShared<Tile>& shared, int which)
      : p_(p), shared_(shared), which_(which) {}

  __device__ void run() {
    WorkQueue<Tile> queue(shared_);
    const Work* work = &queue.next();
    start(*work);
    while (work->valid) {
      const Work* next = nullptr;
      const int steps = work->k_blocks;
      for (int step = 0; step < steps; step += kQuad) {
        take(steps - step);
        if (step + kQuad < steps) {
          load(step + kQuad);
        } else {
          next = &queue.next();
          start(*next);
        }
        put(min(steps - step, kQuad));
      }
      __syncwarp();
      if (cuda::lane_index() == 0) queue.release(*work);
      if (next == nullptr) {
        next = &queue.next();
        start(*next);
      }
      work = next;
    }
  }

 private:
  static constexpr int kMine = Tile::kM / 2 / Tile::kScalers;             // pairs
  static constexpr int kPairs = (kMine + cuda::kWarp - 1) / cuda::kWarp;  // of a lane
  using RowCodes = CodeStream<2 * kPairs>;

  static __device__ bool has(int pair) { return pair * cuda::kWarp + cuda::lane_index() < kMine; }

  // The loads of its first codes are then under way.
  __device__ void start(const Work& work) {
    const int lane = cuda::lane_index(), first = which_ * 2 * kMine + lane / 8 * 16 + lane % 8;
    a_.start(p_.scale_a, work.row + first);
    // A pair of CTAs can have columns past the last: nothing is multiplied there, so any code will
    // do.
    const int64_t b_row = b_code_row(p_, work, kTileN);
    b_.start(p_.scale_b, min(b_row, p_.scale_b.rows - 1));
    simple_ = __all_sync(~0u, a_.is_simple(p_.scale_a, work.k_blocks) && b_.is_simple(p_.scale_b, work.k_blocks));
    load(0);
    rows_ = work.rows - first;
  }

  __device__ __forceinline__ void load(int k) {
    if (simple_) {
      a_.load_simple(p_.scale_a, k);
      b_.load_simple(p_.scale_b, k);
    } else {
      a_.load(p_.scale_a, k);
      b_.load(p_.scale_b, k);
    }
  }

  // The codes that were loaded, of which the first `left` count.
  __device__ void take(int left) {
    const uint32_t b = b_.codes(0);
    uint32_t wild = top_if_wild(b);
#pragma unroll
    for (int i = 0; i < 2 * kPairs; ++i) {
      const uint32_t a = a_.codes(i);
      // Rows that are not stored may hold anything; they need not be slow.
      if (has(i / 2) && RowCodes::row(i) < rows_) wild |= top_if_wild(a);
      exponents_[i] = (a - k64) + (b - k63);
    }
    wild_ = __any_sync(~0u, wild & kTop & bytes_of_steps(left));
  }

  // Those of the first `count` of the four steps, each when its stage is free.
  __device__ __forceinline__ void put(int count) {
    const int lane = cuda::lane_index();
    // Bytes 0 and 2 of what it selects: the exponents of both rows.
    uint32_t bytes = 0x0400;
#pragma unroll 1
    for (int i = 0; i < count; ++i, bytes += 0x0101, at_.advance()) {
      auto& to = shared_.scales[at_.slot];
      mbarrier_sleep(&shared_.empty[at_.slot], at_.phase ^ 1);
#pragma unroll
      for (int pair = 0; pair < kPairs; ++pair) {
        const uint32_t both = __byte_perm(exponents_[2 * pair], exponents_[2 * pair + 1], bytes);
        if (has(pair))
          to.pairs[which_ * kMine + pair * cuda::kWarp + lane] = both << 7 & kExponents;
      }
      if (lane == 0) to.wild[which_] = wild_;
      __syncwarp();
      if (lane == 0) mbarrier_arrive(&shared_.full[at_.slot]);
    }
  }

  static constexpr uint32_t kExponents = 0x7f807f80;  // of two bf16

  const GemmParams& p_;
  GemmShared<Tile>& shared_;
  int which_;
  RingPlace<Tile::kStages> at_;
  RowCodes a_;
  CodeStream<1> b_;
  int rows_ = 0;
  uint32_t exponents_[2 * kPairs];
  bool simple_ = false, wild_ = false;
};

// A consumer thread's side: the scales of its two rows, if none is wild.
template <class Tile>
class RowScales {
 public:
  __device__ RowScales()
      : my_pair_((Rows<Tile>::of_warp(0) / 2 + cuda::lane_index() / 4) * sizeof(uint32_t)) {}

  __device__ __forceinline__ void factors(const StepScales<Tile>& of,
                                          float (&factors)[2][1]) const {
    const auto* pairs = reinterpret_cast<const uint8_t*>(of.pairs);
    const uint32_t pair = *reinterpret_cast<const uint32_t*>(pairs + my_pair_);
    factors[0][0] = __uint_as_float(pair << 16);
    factors[1][0] = __uint_as_float(pair & 0xffff0000);
  }

 private:
  uint32_t my_pair_;  // in bytes: the usual loop has no time to multiply
};

template <class Tile>
__device__ __forceinline__ bool is_wild(const StepScales<Tile>& of) {
  return __any_sync(~0u, *reinterpret_cast<const uint32_t*>(of.wild));
}

}  // namespace moxie::sm90
