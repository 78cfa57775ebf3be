// A TileQueue for tiles that cost at most 15: every pair gets the same tiles, but a run of tiles
// takes no loads from shared memory. Small groups have many runs, and a queue that is late keeps
// the tensor cores waiting (docs/kernels/log/2026-11-19-grouped-gemm.md).
#pragma once

#include "moxie/core/base/cta.cuh"
#include "moxie/core/gemm/work.h"

namespace moxie::sm90 {

// The k lowest of the bits of a word that has more than k.
__device__ inline uint32_t lowest_bits(uint32_t word, int k) {
  int width = 0;  // the most low bits of which at most k are set
#pragma unroll
  for (int step = 16; step > 0; step /= 2)
    if (__popc(word & ((1u << (width + step)) - 1)) <= k) width += step;
  return word & ((1u << width) - 1);
}

// The pairs that become free at the same time are a set of bits. Lane i has the set of the i-th
// time, counted from the earliest; because of kLongest, all are within 16 lanes. Used by one whole
// warp.
class BucketQueue {
 public:
  static constexpr int kLongest = 15;  // the most that a tile may cost

  __device__ BucketQueue(int pairs, int me) : pairs_(pairs) {
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      set_[w] = cuda::lane_index() == 0 ? first_bits(pairs - 32 * w) : 0;
      before_me_[w] = first_bits(me - 32 * w);
      me_[w] = first_bits(me + 1 - 32 * w) ^ before_me_[w];
    }
  }

  // Each of the first `count` pairs takes a tile that costs `time`. Returns the position of this
  // pair among them, or -1 if it takes none.
  __device__ int take(int count, int time) {
    int sum = 0;  // of the pairs up to this lane
#pragma unroll
    for (int w = 0; w < kWords; ++w) sum += __popc(set_[w]);
    int earlier = -sum;
#pragma unroll
    for (int lanes = 1; lanes <= kLongest; lanes *= 2) {
      const int below = __shfl_up_sync(~0u, sum, lanes);
      if (cuda::lane_index() >= lanes) sum += below;
    }
    earlier += sum;
    int left = count - earlier, position = earlier;
    bool is_mine = false;
    uint32_t taken[kWords];
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      const int size = __popc(set_[w]);
      taken[w] = left >= size ? set_[w] : left <= 0 ? 0 : lowest_bits(set_[w], left);
      left -= size;
      position += __popc(set_[w] & before_me_[w]);
      is_mine = is_mine || (taken[w] & me_[w]);
    }
    const uint32_t where = __ballot_sync(~0u, is_mine);
    position = where ? __shfl_sync(~0u, position, __ffs(static_cast<int>(where)) - 1) : -1;
    if (count < pairs_) move(taken, time);  // else the order stays
    return position;
  }

 private:
  static constexpr int kWords = (kMaxPairs + 31) / 32;

  static __device__ uint32_t first_bits(int n) {
    return n <= 0 ? 0 : n >= 32 ? ~0u : (1u << n) - 1;
  }

  // Moves pairs to a later time, and the sets so that lane 0 has the earliest again.
  __device__ void move(const uint32_t (&taken)[kWords], int time) {
    uint32_t any = 0;
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      const uint32_t came = __shfl_up_sync(~0u, taken[w], static_cast<unsigned>(time));
      set_[w] ^= taken[w];
      if (cuda::lane_index() >= time) set_[w] |= came;
      any |= set_[w];
    }
    const int first = __ffs(static_cast<int>(__ballot_sync(~0u, any != 0))) - 1;
    if (first == 0) return;
    const int from = cuda::lane_index() + first;
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      const uint32_t at = __shfl_sync(~0u, set_[w], from);
      set_[w] = from < cuda::kWarp ? at : 0;
    }
  }

  int pairs_;
  uint32_t set_[kWords];
  uint32_t before_me_[kWords],
      me_[kWords];  // the pairs whose number is below this pair's; this one
};

}  // namespace moxie::sm90
