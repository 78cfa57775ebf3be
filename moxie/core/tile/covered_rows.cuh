// Which rows belong to a group. The others are behind the last group.
#pragma once

#include "moxie/core/base/cuda.cuh"
#include "moxie/core/layout/check_args.h"

namespace moxie::cuda {

// Ends of groups, to know how many rows they cover.
struct CoveredRows {
  const int32_t* offs;  // may be nullptr
  int64_t groups;
  int64_t rows;  // of all

  explicit CoveredRows(const OptionalOffs& of, int64_t all)
      : offs(of ? of->data : nullptr), groups(of ? of->dim(0) : 0), rows(all) {}

  // Up to the largest end, even if offs decrease. All lanes of a warp must call it.
  __device__ int64_t count() const {
    if (!offs) return rows;
    int32_t last = 0;
    for (int64_t g = lane_index(); g < groups; g += kWarp) last = max(last, offs[g]);
#pragma unroll
    for (int step = kWarp / 2; step > 0; step /= 2)
      last = max(last, __shfl_xor_sync(~0u, last, step));
    return min<int64_t>(last, rows);
  }
};

}  // namespace moxie::cuda
