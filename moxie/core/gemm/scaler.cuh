// Forward and dgrad: two warps find the scales of a step and leave their codes in shared memory,
// beside the operands: a consumer thread has three bytes to read per step.
#pragma once

#include "moxie/core/gemm/scales.cuh"
#include "moxie/core/gemm/schedule.cuh"

namespace moxie::sm90 {

// The codes of kRows rows, 32 apart, four steps at a time. Rows past the end of the matrix have
// zeros.
template <int kRows>
class CodeStream {
 public:
  __device__ __forceinline__ void start(const ScaleMatrix& scale, int64_t row) {
    const int64_t byte = scale.data - reinterpret_cast<const uint8_t*>(scale.words);
    first_ = static_cast<uint32_t>(byte + row * scale.stride);
  }
  // The load of those of step k and the next three is then under way.
  __device__ __forceinline__ void load(const ScaleMatrix& scale, int k) {
    const uint32_t byte = first_ + k;
    shift_ = byte % kQuad * 8;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const uint32_t at =
          byte / kQuad + static_cast<uint32_t>(i * cuda::kWarp / kQuad * scale.stride);
      low_[i] = word(scale, at);
      high_[i] = 0;
      if (shift_ != 0) high_[i] = word(scale, at + 1);
    }
  }
  __device__ __forceinline__ uint32_t codes(int i) const {
    return __funnelshift_r(low_[i], high_[i], shift_);
  }

 private:
  static __device__ __forceinline__ uint32_t word(const ScaleMatrix& scale, uint32_t at) {
    const uint32_t* word = scale.words + at;
    return at - scale.first_word < scale.num_words
               ? __ldg(word)
               : codes_inside<1>(scale, reinterpret_cast<const uint8_t*>(word));
  }

  uint32_t first_, shift_, low_[kRows], high_[kRows];
};

// Half of the rows, one warp.
template <class Tile>
class Scaler {
 public:
  __device__ Scaler(const GemmParams& p, GemmShared<Tile>& shared, int which)
      : p_(p), shared_(shared), which_(which) {}

  __device__ void run() {
    WorkQueue<Tile> queue(shared_);
    RingPlace<Tile::kStages> at;
    const int lane = cuda::lane_index();
    const Work* work = &queue.next();
    start(*work);
    while (work->valid) {
      const Work* next = nullptr;
      const int steps = work->k_blocks;
      for (int step = 0; step < steps; ++step, at.advance()) {
        if (step % kQuad == 0) {
          take(steps - step);
          if (step + kQuad < steps) {
            load(step + kQuad);
          } else {
            next = &queue.next();
            start(*next);
          }
        }
        mbarrier_wait(&shared_.empty[at.slot], at.phase ^ 1);
        put(shared_.scales[at.slot]);
        __syncwarp();
        if (lane == 0) mbarrier_arrive(&shared_.full[at.slot]);
      }
      __syncwarp();
      if (lane == 0) queue.release(*work);
      if (next == nullptr) {
        next = &queue.next();
        start(*next);
      }
      work = next;
    }
  }

 private:
  static constexpr int kMine = Tile::kM / Tile::kScalers;
  static constexpr int kRows = kMine / cuda::kWarp;  // of a lane: lane, lane + 32, ..

  // The loads of its first codes are then under way.
  __device__ void start(const Work& work) {
    const int first = which_ * kMine + cuda::lane_index();
    a_.start(p_.scale_a, work.row + first);
    // A pair can have columns past the last: nothing is multiplied there, so any code will do.
    const int64_t b_row = b_code_row(p_, work, kTileN);
    b_.start(p_.scale_b, min(b_row, p_.scale_b.rows - 1));
    load(0);
    rows_ = work.rows - first;
  }

  __device__ __forceinline__ void load(int k) {
    a_.load(p_.scale_a, k);
    b_.load(p_.scale_b, k);
  }

  // The codes that were loaded, of which the first `left` count.
  __device__ void take(int left) {
    b_word_ = b_.codes(0);
    uint32_t wild = top_if_wild(b_word_);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      a_words_[i] = a_.codes(i);
      // Rows that are not stored may hold anything; they need not be slow.
      if (i * cuda::kWarp < rows_) wild |= top_if_wild(a_words_[i]);
    }
    wild_ = __any_sync(~0u, wild & kTop & bytes_of_steps(left));
  }

  // Those of one step; the next is then the first.
  __device__ __forceinline__ void put(StepScales<Tile>& to) {
    const int lane = cuda::lane_index();
    if (which_ == 0 && lane == 0) to.column = static_cast<uint8_t>(b_word_);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      to.rows[which_ * kMine + lane + i * cuda::kWarp] = static_cast<uint8_t>(a_words_[i]);
      a_words_[i] >>= 8;
    }
    b_word_ >>= 8;
    if (lane == 0) to.wild[which_] = wild_;
  }

  const GemmParams& p_;
  GemmShared<Tile>& shared_;
  int which_;
  CodeStream<kRows> a_;
  CodeStream<1> b_;
  int rows_ = 0;
  uint32_t a_words_[kRows], b_word_ = 0;
  bool wild_ = false;
};

// A consumer thread's side: the scales of its two rows.
template <class Tile>
class RowScales {
 public:
  __device__ __forceinline__ explicit RowScales(const StepScales<Tile>& of) : of_(of) {}

  __device__ __forceinline__ bool wild() const {
    return __any_sync(~0u, *reinterpret_cast<const uint32_t*>(of_.wild));
  }
  // If none is wild.
  __device__ __forceinline__ void factors(float (&factors)[2][1]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half)
      factors[half][0] = __uint_as_float((uint32_t{row(half)} + of_.column - 127) << 23);
  }
  __device__ float2 wild_factors(int half) const {
    return sm90::wild_factors(row(half), of_.column);
  }

 private:
  __device__ __forceinline__ uint8_t row(int half) const {
    return of_.rows[Rows<Tile>::of_thread(0) + half * 8];
  }

  const StepScales<Tile>& of_;
};

}  // namespace moxie::sm90
