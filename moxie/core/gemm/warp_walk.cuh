// A warp's walk over the groups of a GEMM.
#pragma once

#include "moxie/core/base/cta.cuh"
#include "moxie/core/gemm/work.h"
#include "moxie/core/layout/group_walk.h"

namespace moxie::sm90 {

// Visits one group after the other. All lanes walk together and read offs 32 at a time.
class WarpWalk {
 public:
  __device__ explicit WarpWalk(const ScheduleParams& p) : p_(p) {}

  int group = -1;
  int begin = 0, end = 0;         // rows
  int k_begin = 0, k_blocks = 0;  // rows as k (wgrad): first block and number of blocks

  __device__ void restart() {
    group = -1;
    begin = end = k_begin = k_blocks = 0;
  }

  // Moves to the next group. After the last group come the rows that no group covers.
  __device__ void next() {
    ++group;
    if (p_.offs && group < p_.groups && group % cuda::kWarp == 0) {
      const int g = group + cuda::lane_index();
      window_ = g < p_.groups ? p_.offs[g] : 0;
    }
    const int listed = p_.offs ? __shfl_sync(~0u, window_, group % cuda::kWarp) : p_.rows;
    begin = end;
    end = group < p_.groups ? group_end(listed, begin, p_.rows) : p_.rows;
    k_begin += k_blocks;
    k_blocks = tiles_of_group<Cut::kAtPanels>(0, end - begin);
  }

 private:
  static_assert(kTileK == kScaleTileRows);
  const ScheduleParams& p_;
  int window_ = 0;
};

}  // namespace moxie::sm90
