// Which pair of CTAs takes the next tile. Pairs share a list of tiles, and tiles do not take
// equally long. Every pair works out which of them each pair takes, by the same model of time, so
// nothing has to be passed between them and a run is repeatable.
#pragma once

#include "moxie/core/base/cta.cuh"
#include "moxie/core/base/math.h"
#include "moxie/core/gemm/work.h"

namespace moxie::sm90 {

// What a step takes in a tile of so many times 64 rows. One warpgroup alone waits for its own
// products most of the time, and two now and then.
template <class Tile>
constexpr __device__ int step_time(int blocks) {
  if (Tile::kConsumers == 2) return blocks == 1 ? 9 : 10;
  return blocks == 1 ? 6 : blocks == 2 ? 7 : 10;
}

// One warp. The pairs in the order in which they will be free: its time, and below it the pair.
class TileQueue {
 public:
  __device__ TileQueue(uint32_t (&queue)[kMaxPairs], int pairs) : queue_(queue), pairs_(pairs) {
    for (int i = cuda::lane_index(); i < pairs; i += cuda::kWarp)
      queue_[i] = static_cast<uint32_t>(i);
    __syncwarp();
  }

  // How many come before this pair.
  __device__ int before(int pair) const {
    int found = 0;
    for (int i = cuda::lane_index(); i < pairs_; i += cuda::kWarp)
      if (queue_[i] % kMaxPairs == static_cast<uint32_t>(pair)) found = i;
    return __reduce_add_sync(~0u, found);
  }

  // The first `count` take a tile each that takes so long.
  __device__ void pass(int count, int time) {
    if (count == pairs_) return;  // as before
    const uint32_t took = static_cast<uint32_t>(min(time, kLongest)) * kMaxPairs;
    // Time begins anew now and then, so that it does not overflow.
    const uint32_t gone = queue_[0] < kLate ? 0 : queue_[0] / kMaxPairs * kMaxPairs;
    const uint32_t later = took - gone, others_later = 0 - gone;
    uint32_t entry[kMine];
    int place[kMine];
#pragma unroll
    for (int m = 0; m < kMine; ++m) {
      const int i = m * cuda::kWarp + cuda::lane_index();
      if (i >= pairs_) break;
      // Both are in order, and each finds its place among the others.
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

 private:
  static constexpr int kMine = (kMaxPairs + cuda::kWarp - 1) / cuda::kWarp;
  static constexpr int kLongest = 1 << 20;
  static constexpr uint32_t kLate = 1 << 30;
  static_assert(kLate + 2ull * kLongest * kMaxPairs < 1ull << 32);

  // How many of [begin, end), that much later, are less than the entry.
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
  int pairs_;
};

}  // namespace moxie::sm90
