// wgrad: keeps the pairs of CTAs in step. They multiply the same rows of a and columns of b at the
// same depth, and what one has loaded the others find in cache, but only if they ask for it soon:
// left alone, pairs drift apart by more than the cache holds, and memory is read several times.
//
// A pair that is ahead of the mean waits a little. Nothing depends on it but time: a pair that has
// waited for long, as others may not even run yet, gives up, and sets all others free.
#pragma once

#include <atomic>
#include <cstdint>

#include "moxie/core/gemm/gemm_params.cuh"

namespace moxie::sm90 {

// Of one launch: zero before it and after it.
struct ThrottleCounter {
  unsigned long long steps;  // of all pairs
  unsigned finished;         // pairs
};

// Launches of the same number of pairs use their counters round-robin. Two that run at once and
// have the same one lose time, no more: each subtracts what it added, so it is zero after both.
inline constexpr int kCountersOfSize = 16;
[[maybe_unused]] static __device__ ThrottleCounter
    throttle_counters[(kMaxPairs + 1) * kCountersOfSize];
inline int next_throttle_counter(int pairs) {
  static std::atomic<unsigned> launches = 0;
  return pairs * kCountersOfSize + static_cast<int>(launches++ % kCountersOfSize);
}

// One thread of each pair has one.
class Throttle {
 public:
  __device__ Throttle(ThrottleCounter& counter, int pairs) : counter_(counter), pairs_(pairs) {}

  // Before each step.
  __device__ __forceinline__ void step() {
    if (done_ % kEvery == 0 && !free_) {
      // What was asked for kEvery steps ago has arrived by now.
      if (is_ahead(done_ - kEvery, steps_)) wait();
      steps_ = atomicAdd(&counter_.steps, kEvery);
    }
    ++done_;
  }

  // After the last. The last pair leaves the counter as it was.
  __device__ void finish() {
    atomicAdd(&counter_.steps, kFree);
    __threadfence();
    if (atomicInc(&counter_.finished, pairs_ - 1) + 1 == pairs_) atomicExch(&counter_.steps, 0);
  }

 private:
  static constexpr int kEvery = 4;               // steps: an answer takes one or two
  static constexpr int kWindow = 4;              // steps ahead of the mean; 12 read a fifth more
  static constexpr int kPolls = 256;             // of 64 ns and an answer: more than any step takes
  static constexpr uint64_t kFree = 1ull << 40;  // more steps than there are

  __device__ bool is_ahead(int64_t done, uint64_t steps) const {
    return done * pairs_ > static_cast<int64_t>(steps) + kWindow * pairs_;
  }
  __device__ void wait() {
    for (int i = 0; i < kPolls; ++i) {
      __nanosleep(64);
      if (!is_ahead(done_, *const_cast<volatile unsigned long long*>(&counter_.steps))) return;
    }
    free_ = true;
    atomicAdd(&counter_.steps, kFree);
  }

  ThrottleCounter& counter_;
  unsigned pairs_;
  int64_t done_ = 0;
  uint64_t steps_ = 0;  // of all pairs, when this one had done kEvery less
  bool free_ = false;
};

}  // namespace moxie::sm90
