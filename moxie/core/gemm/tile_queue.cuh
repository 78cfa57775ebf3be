// Decides which pair of CTAs takes the next tile. Pairs share one list of tiles of different
// lengths. Every pair simulates all pairs with the same cost model and so finds its own tiles: the
// pairs do not communicate, and a run is repeatable.
#pragma once

#include "moxie/core/base/cta.cuh"
#include "moxie/core/base/math.h"
#include "moxie/core/gemm/work.h"

namespace moxie::sm90 {

// The pairs, sorted by the time at which they become free. An entry is time * kMaxPairs + pair.
// Used by one whole warp, of which every lane has several entries.
class TileQueue {
 public:
  __device__ TileQueue(uint32_t (&queue)[kMaxPairs], int pairs, int me)
      : queue_(queue), pairs_(pairs), position_(me) {
    for (int i = cuda::lane_index(); i < pairs; i += cuda::kWarp)
      queue_[i] = static_cast<uint32_t>(i);
    __syncwarp();
  }

  // Each of the first `count` pairs takes a tile that costs `time`. Returns the position of this
  // pair among them, or -1 if it takes none.
  __device__ int take(int count, int time) {
    const int position = position_;
    if (count < pairs_) move(count, time);  // else the order stays
    return position < count ? position : -1;
  }

 private:
  static constexpr int kMine = (kMaxPairs + cuda::kWarp - 1) / cuda::kWarp;
  static constexpr int kLongest = 1 << 20;    // the most that one tile's cost adds to a time
  static constexpr uint32_t kLate = 1 << 30;  // times are reset from here on, to fit 32 bits
  static_assert(kLate + 2ull * kLongest * kMaxPairs < 1ull << 32);

  __device__ void move(int count, int time) {
    const uint32_t took = static_cast<uint32_t>(min(time, kLongest)) * kMaxPairs;
    // Once the earliest time is late (kLate), it is subtracted from all, so that no time overflows.
    const uint32_t gone = queue_[0] < kLate ? 0 : queue_[0] / kMaxPairs * kMaxPairs;
    const uint32_t later = took - gone, others_later = 0 - gone;
    // The entries that take a tile and the others both stay sorted. This merges the two parts: each
    // entry finds by bisection how many entries of the other part come before it. All lanes take
    // as many steps, so that the loads of a lane's entries overlap.
    uint32_t entry[kMine];
    int found[kMine], end[kMine];  // entries of the other part from its begin on
#pragma unroll
    for (int m = 0; m < kMine; ++m) {
      const int i = m * cuda::kWarp + cuda::lane_index();
      entry[m] = queue_[min(i, pairs_ - 1)] + (i < count ? later : others_later);
      found[m] = i < count ? count : 0;
      end[m] = i < count ? pairs_ : count;
    }
#pragma unroll
    for (int step = kSearch; step > 0; step /= 2)
#pragma unroll
      for (int m = 0; m < kMine; ++m) {
        const int at = found[m] + step - 1;
        const uint32_t other =
            queue_[min(at, kMaxPairs - 1)] +
            (m * cuda::kWarp + cuda::lane_index() < count ? others_later : later);
        if (at < end[m] && other < entry[m]) found[m] += step;
      }
    __syncwarp();
    int mine = 0;
#pragma unroll
    for (int m = 0; m < kMine; ++m) {
      const int i = m * cuda::kWarp + cuda::lane_index();
      const int place = i < count ? i + found[m] - count : i - count + found[m];
      if (i < pairs_) queue_[place] = entry[m];
      if (i == position_) mine = place;
    }
    position_ = __reduce_add_sync(~0u, mine);
    __syncwarp();
  }

  static constexpr int kSearch = 64;  // the largest power of 2 up to kMaxPairs
  static_assert(kSearch <= kMaxPairs && kMaxPairs < 2 * kSearch);

  uint32_t (&queue_)[kMaxPairs];
  int pairs_, position_;  // position_: of this pair
};

}  // namespace moxie::sm90
