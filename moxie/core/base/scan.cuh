// Prefix sums of a warp and of a CTA.
#pragma once

#include "moxie/core/base/cta.cuh"
#include "moxie/core/base/math.h"

namespace moxie::cuda {

// The sum of the values of this lane and the lanes before it.
__device__ inline int32_t scan_warp(int32_t value) {
#pragma unroll
  for (int step = 1; step < kWarp; step *= 2) {
    const int32_t other = __shfl_up_sync(~0u, value, step);
    if (lane_index() >= step) value += other;
  }
  return value;
}

// Calls store(i, sum of value_of() before i, value_of(i)) for every i below `count`. All threads of
// a CTA must call it; behind its last barrier they may read what was stored.
template <class ValueOf, class Store>
__device__ void scan_cta(int count, ValueOf&& value_of, Store&& store) {
  __shared__ int32_t of_warp[kWarps];
  const int share = ceil_div(count, kThreads);
  const int first = min(static_cast<int>(threadIdx.x) * share, count);
  const int last = min(first + share, count);
  int32_t mine = 0;
  for (int i = first; i < last; ++i) mine += value_of(i);
  const int32_t upto = scan_warp(mine);
  if (lane_index() == kWarp - 1) of_warp[warp_index()] = upto;
  __syncthreads();
  int32_t before = upto - mine;
  for (int w = 0; w < warp_index(); ++w) before += of_warp[w];
  for (int i = first; i < last; ++i) {
    const int32_t value = value_of(i);
    store(i, before, value);
    before += value;
  }
  __syncthreads();
}

}  // namespace moxie::cuda
