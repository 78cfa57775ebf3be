// Scale warps: two warps that load the scales of each step, add the exponents of a and b, and leave
// them in shared memory beside the operands. A consumer thread reads one word per step, and in
// wgrad the four scales of b as well.
#pragma once

#include "moxie/core/gemm/scale_codes.cuh"
#include "moxie/core/gemm/work_ring.cuh"

namespace moxie::sm90 {

// Reads the codes of kRows rows, four steps at a time. A tile may extend past the matrix: rows past
// the end read the last row's codes, as their results are not stored.
template <int kRows, Ragged kRagged>
class CodeStream {
 public:
  // Starts at row `first` and step k, and issues the first loads.
  __device__ __forceinline__ void start(const ScaleMatrix& scale, const CodeRow& first, int k) {
    at_ = first.word(scale, k);
    rows_left_ = static_cast<int>(scale.rows) - 1 - first.row;
    inside_ = __all_sync(~0u, row(kRows - 1) <= rows_left_);
    if constexpr (kShifted) {
      shift_ = k % kQuad * 8;
      quads_left_ = static_cast<int>(scale.quads) - 1 - k / kQuad;
      load(scale);
    }
    next(scale);
  }
  // Issues the loads for the next four steps; the first use of codes() waits for them.
  __device__ __forceinline__ void next(const ScaleMatrix& scale) {
    if constexpr (kShifted) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) low_[i] = high_[i];
      // No quad follows the last one; there are no steps past it.
      if (--quads_left_ < 0) return;
    }
    load(scale);
  }
  __device__ __forceinline__ uint32_t codes(int i) const {
    if constexpr (kShifted) return __funnelshift_r(low_[i], high_[i], shift_);
    return high_[i];
  }
  // Row i of this lane, relative to its first: pairs of rows 8 apart, and the next pair 64 below
  // (the 32 lanes of a warp cover 64 rows).
  static constexpr __device__ int row(int i) { return i / 2 * 64 + i % 2 * 8; }

 private:
  // In wgrad a group may begin at any step of a quad.
  static constexpr bool kShifted = kRagged == Ragged::kDepth;

  __device__ __forceinline__ void load(const ScaleMatrix& scale) {
    const uint32_t* from = scale.words + at_;
    at_ += scale.rows;
    if (inside_) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) high_[i] = __ldg(from + row(i));
    } else {
#pragma unroll
      for (int i = 0; i < kRows; ++i) high_[i] = __ldg(from + min(row(i), rows_left_));
    }
  }

  uint32_t at_, high_[kRows];
  int rows_left_;
  bool inside_;  // no lane has a row past the end
  [[maybe_unused]] uint32_t low_[kRows], shift_;
  [[maybe_unused]] int quads_left_;  // after the one in high_
};

// One scale warp, for half of the tile's rows. Lane l has row pairs l and (if kMine > 32) l + 32 of
// its half, and span l % kSpans of b.
template <class Tile>
class ScaleWarp {
 public:
  __device__ ScaleWarp(const GemmParams& p, GemmShared<Tile>& shared, int which)
      : p_(p), shared_(shared), which_(which) {}

  __device__ void run() {
    WorkRing<Tile> ring(shared_);
    const Work* work = &ring.next();
    start(*work);
    while (work->valid) {
      const Work* next = nullptr;
      const int steps = work->k_blocks;
      for (int step = 0; step < steps; step += kQuad) {
        take(steps - step);
        if (step + kQuad < steps) {
          a_.next(p_.scale_a);
          b_.next(p_.scale_b);
        } else {
          next = &ring.next();
          start(*next);
        }
        put(min(steps - step, kQuad));
      }
      __syncwarp();
      if (cuda::lane_index() == 0) ring.release(*work);
      if (next == nullptr) {
        next = &ring.next();
        start(*next);
      }
      work = next;
    }
  }

 private:
  static constexpr int kMine = Tile::kM / 2 / Tile::kScaleWarps;          // row pairs of a warp
  static constexpr int kPairs = (kMine + cuda::kWarp - 1) / cuda::kWarp;  // row pairs of a lane
  using RowCodes = CodeStream<2 * kPairs, Tile::kRagged>;

  static __device__ bool has(int pair) { return pair * cuda::kWarp + cuda::lane_index() < kMine; }

  // Starts a tile: issues the loads of its first codes, if it has steps.
  __device__ void start(const Work& work) {
    const int lane = cuda::lane_index(), first = which_ * 2 * kMine + lane / 8 * 16 + lane % 8;
    rows_ = work.rows - first;
    if (work.k_blocks == 0) return;
    a_.start(p_.scale_a, {0, work.row + first}, work.k_begin);
    b_.start(p_.scale_b, b_code_row<Tile>(p_, work, lane % Tile::kSpans), work.k_begin);
  }

  // Turns the codes of four steps into exponents. Steps from `left` on do not count as wild.
  __device__ void take(int left) {
    const uint32_t b = b_.codes(0);
    uint32_t wild = top_if_wild(b);
    b_exponents_ = b - kBelowTame;
#pragma unroll
    for (int i = 0; i < 2 * kPairs; ++i) {
      const uint32_t a = a_.codes(i);
      // Rows that are not stored may hold any code; they must not force the slow path.
      if (has(i / 2) && RowCodes::row(i) < rows_) wild |= top_if_wild(a);
      a_exponents_[i] = a - kLowestTame;
      if constexpr (Tile::kSpans == 1) a_exponents_[i] += b_exponents_;
    }
    wild_ = __any_sync(~0u, wild & kTopBits & bytes_of_steps(left));
  }

  // Writes the scales of the first `count` of the four steps, each when its stage is free.
  __device__ __forceinline__ void put(int count) {
    const int lane = cuda::lane_index();
#pragma unroll 1
    for (uint32_t step = 0; step < count; ++step, at_.advance()) {
      auto& to = shared_.scales[at_.slot];
      ptx::mbarrier_sleep(&shared_.empty[at_.slot], at_.phase ^ 1);
#pragma unroll
      for (int pair = 0; pair < kPairs; ++pair) {
        // Byte `step` of the first row goes to byte 0, of the second row (selector 4 + step) to
        // byte 2. The shift makes each the exponent field of a bf16, the upper half of an f32.
        const uint32_t both =
            __byte_perm(a_exponents_[2 * pair], a_exponents_[2 * pair + 1], 0x0400 + 0x0101 * step);
        if (has(pair))
          to.pairs[which_ * kMine + pair * cuda::kWarp + lane] = (both << 7) & kTwoExponents;
      }
      if constexpr (Tile::kSpans > 1)
        if (which_ == 0 && lane < Tile::kSpans)  // byte `step`, as the exponent field of an f32
          to.spans[lane] = __byte_perm(b_exponents_, 0, 0x4440 + step) << 23;
      if (lane == 0) to.wild[which_] = wild_;
      __syncwarp();
      if (lane == 0) ptx::mbarrier_arrive(&shared_.full[at_.slot]);
    }
  }

  static constexpr uint32_t kTwoExponents = 0x7f807f80;  // exponent fields of two bf16

  const GemmParams& p_;
  GemmShared<Tile>& shared_;
  int which_;
  RingPlace<Tile::kStages> at_;
  RowCodes a_;
  CodeStream<1, Tile::kRagged> b_;
  int rows_ = 0;
  uint32_t a_exponents_[2 * kPairs], b_exponents_ = 0;
  bool wild_ = false;
};

// The consumer's side: reads the factors of a thread's two rows and each span, if none is wild.
template <class Tile>
class StepFactors {
 public:
  using Factors = float[2][Tile::kSpans];

  __device__ StepFactors()
      : my_pair_((Rows::of_warp() / 2 + cuda::lane_index() / 4) * sizeof(uint32_t)) {}

  __device__ __forceinline__ void read(const StepScales<Tile>& of, Factors& factors) const {
    const auto* pairs = reinterpret_cast<const uint8_t*>(of.pairs);
    const uint32_t pair = *reinterpret_cast<const uint32_t*>(pairs + my_pair_);
    const uint32_t rows[2] = {pair << 16, pair & 0xffff0000};
    if constexpr (Tile::kSpans == 1) {
      factors[0][0] = __uint_as_float(rows[0]);
      factors[1][0] = __uint_as_float(rows[1]);
    } else {
      static_assert(Tile::kSpans == 4);
      const uint4 spans = *reinterpret_cast<const uint4*>(of.spans);
      const uint32_t span[4] = {spans.x, spans.y, spans.z, spans.w};
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int j = 0; j < 4; ++j) factors[half][j] = __uint_as_float(rows[half] + span[j]);
    }
  }

 private:
  uint32_t my_pair_;  // in bytes, which saves a multiplication per step
};

template <class Tile>
__device__ __forceinline__ bool is_wild(const StepScales<Tile>& of) {
  return __any_sync(~0u, *reinterpret_cast<const uint32_t*>(of.wild));
}

}  // namespace moxie::sm90
