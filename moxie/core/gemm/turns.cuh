// Whose turn it is. Pairs of CTAs share a list of tiles, and tiles do not take equally long. Every
// pair works out which of them each pair takes, by the same model of time, so nothing has to be
// passed between them and a run is repeatable.
#pragma once

#include "moxie/core/base/cuda.cuh"
#include "moxie/core/gemm/tile.cuh"

namespace moxie::sm90 {

// One warp. The pairs in the order in which they will be free: its time, and below it the pair.
class Turns {
 public:
  __device__ Turns(uint32_t (&queue)[kMaxPairs], int pairs) : queue_(queue), pairs_(pairs) {
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
    const uint32_t later = static_cast<uint32_t>(time) * kMaxPairs;
    uint32_t entry[kMine];
    int place[kMine];
#pragma unroll
    for (int m = 0; m < kMine; ++m) {
      const int i = m * cuda::kWarp + cuda::lane_index();
      if (i >= pairs_) break;
      // Both those who took one and the others are in order: each finds its place among the others.
      const bool took = i < count;
      entry[m] = queue_[i] + (took ? later : 0);
      place[m] =
          took ? i + less(count, pairs_, entry[m], 0) : i - count + less(0, count, entry[m], later);
    }
    __syncwarp();
#pragma unroll
    for (int m = 0; m < kMine; ++m)
      if (m * cuda::kWarp + cuda::lane_index() < pairs_) queue_[place[m]] = entry[m];
    __syncwarp();
  }

 private:
  static constexpr int kMine = (kMaxPairs + cuda::kWarp - 1) / cuda::kWarp;

  // How many of [begin, end) are less than the entry, `later` being added to them.
  __device__ int less(int begin, int end, uint32_t entry, uint32_t later) const {
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
