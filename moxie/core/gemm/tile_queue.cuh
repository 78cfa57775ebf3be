// Decides which pair of CTAs takes the next tile. Pairs share one list of tiles of different
// lengths. Every pair simulates all pairs with the same cost model and so finds its own tiles: the
// pairs do not communicate, and a run is repeatable.
#pragma once

#include "moxie/core/base/cta.cuh"
#include "moxie/core/base/math.h"
#include "moxie/core/gemm/work.h"

namespace moxie::sm90 {

// The pairs, sorted by the time at which they become free. An entry is time * kMaxPairs + pair.
// Used by one whole warp.
class TileQueue {
 public:
  __device__ TileQueue(uint32_t (&queue)[kMaxPairs], int pairs, int me)
      : queue_(queue), pairs_(pairs), me_(me) {
    for (int i = cuda::lane_index(); i < pairs; i += cuda::kWarp)
      queue_[i] = static_cast<uint32_t>(i);
    __syncwarp();
  }

  // Each of the first `count` pairs takes a tile that costs `time`. Returns the position of this
  // pair among them, or -1 if it takes none.
  __device__ int take(int count, int time) {
    const int position = my_position();
    if (count < pairs_) move(count, time);  // else the order stays
    return position < count ? position : -1;
  }

 private:
  static constexpr int kMine = (kMaxPairs + cuda::kWarp - 1) / cuda::kWarp;
  static constexpr int kLongest = 1 << 20;    // the most that one tile's cost adds to a time
  static constexpr uint32_t kLate = 1 << 30;  // times are reset from here on, to fit 32 bits
  static_assert(kLate + 2ull * kLongest * kMaxPairs < 1ull << 32);

  __device__ int my_position() const {
    int found = 0;
    for (int i = cuda::lane_index(); i < pairs_; i += cuda::kWarp)
      if (queue_[i] % kMaxPairs == static_cast<uint32_t>(me_)) found = i;
    return __reduce_add_sync(~0u, found);
  }

  __device__ void move(int count, int time) {
    const uint32_t took = static_cast<uint32_t>(min(time, kLongest)) * kMaxPairs;
    // Once the earliest time is late (kLate), it is subtracted from all, so that no time overflows.
    const uint32_t gone = queue_[0] < kLate ? 0 : queue_[0] / kMaxPairs * kMaxPairs;
    const uint32_t later = took - gone, others_later = 0 - gone;
    uint32_t entry[kMine];
    int place[kMine];
#pragma unroll
    for (int m = 0; m < kMine; ++m) {
      const int i = m * cuda::kWarp + cuda::lane_index();
      if (i >= pairs_) break;
      // The entries that take a tile and the others both stay sorted. This merges the two parts:
      // each entry finds its place in the other part.
      const bool takes = i < count;
      entry[m] = queue_[i] + (takes ? later : others_later);
      place[m] = takes ? i + less(count, pairs_, others_later, entry[m])
                       : i - count + less(0, count, later, entry[m]);
    }
    __syncwarp();
#pragma unroll
    for (int m = 0; m < kMine; ++m)
      if (m * cuda::kWarp + cuda::lane_index() < pairs_) queue_[place[m]] = entry[m];
    __syncwarp();
  }

  // The number of queue entries in [begin, end) that are below `entry` once `later` is added.
  __device__ int less(int begin, int end, uint32_t later, uint32_t entry) const {
    const int first = begin;
    while (begin < end) {
      const int middle = (begin + end) / 2;
      if (queue_[middle] + later < entry)
        begin = middle + 1;
      else
        end = middle;
    }
    return begin - first;
  }

  uint32_t (&queue_)[kMaxPairs];
  int pairs_, me_;
};

}  // namespace moxie::sm90
