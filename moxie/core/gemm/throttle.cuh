// Throttle of wgrad: keeps the pairs of CTAs at about the same depth. Pairs read the same rows of a
// and columns of b, so what one pair loads the others find in L2, if they read it soon after.
// Without a throttle pairs drift apart by more than L2 holds, and memory is read several times.
//
// A pair that is ahead of the mean waits a little. Only speed depends on it: a pair that has waited
// too long (others may not be running yet) gives up and releases all the others as well.
#pragma once

#include <atomic>
#include <cstdint>

#include "moxie/core/gemm/gemm_params.cuh"

namespace moxie::sm90 {

// State of one launch; zero before and after it.
struct ThrottleCounter {
  unsigned long long steps;  // started by all pairs together
  unsigned finished;         // number of pairs that are done
};

// Counters are recycled round-robin per grid size. Two concurrent launches that share one lose
// time, never correctness; the counter is zero again after both. 16 per size make that rare.
inline constexpr int kCountersOfSize = 16;
[[maybe_unused]] static __device__ ThrottleCounter
    throttle_counters[(kMaxPairs + 1) * kCountersOfSize];
inline int next_throttle_counter(int pairs) {
  static std::atomic<unsigned> launches = 0;
  return pairs * kCountersOfSize + static_cast<int>(launches++ % kCountersOfSize);
}

// Owned by the producer thread of the first CTA of each pair.
class Throttle {
 public:
  __device__ Throttle(ThrottleCounter& counter, int pairs) : counter_(counter), pairs_(pairs) {}

  // Call before each step.
  __device__ __forceinline__ void step() {
    if (done_ % kEvery == 0 && !free_) {
      // steps_ comes from the atomic of kEvery steps ago, whose result has arrived by now.
      if (is_ahead(done_ - kEvery, steps_)) wait();
      steps_ = atomicAdd(&counter_.steps, kEvery);
    }
    ++done_;
  }

  // Call after the last step. The last pair to finish resets the counter.
  __device__ void finish() {
    atomicAdd(&counter_.steps, kFree);
    __threadfence();
    if (atomicInc(&counter_.finished, pairs_ - 1) + 1 == pairs_) atomicExch(&counter_.steps, 0);
  }

 private:
  static constexpr int kEvery = 4;    // steps between atomics; one atomic takes 1 to 2 steps
  static constexpr int kWindow = 4;   // steps a pair may be ahead; with 12, a fifth more is read
  static constexpr int kPolls = 256;  // of 64 ns and a load each: together longer than any step
  static constexpr uint64_t kFree = 1ull << 40;  // more steps than any launch has: nobody waits

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
  uint64_t steps_ = 0;  // as this pair's last atomicAdd returned counter_.steps, kEvery steps ago
  bool free_ = false;
};

}  // namespace moxie::sm90
