// What passes tiles from the warp that schedules them (row_schedule.cuh, depth_schedule.cuh) to the
// others: a ring, so that nobody waits for its divisions. And the walk over the groups.
#pragma once

#include "moxie/core/base/cuda.cuh"
#include "moxie/core/gemm/tile.cuh"
#include "moxie/core/sm90/mbarrier.cuh"

namespace moxie::sm90 {

// Tells the compiler what it cannot see, that all lanes have the same value: stages and
// descriptors then live in uniform registers (12 % of the kernel's speed).
__device__ __forceinline__ int uniform(int value) { return __shfl_sync(~0u, value, 0); }

// The groups one after the other, their ends pulled into line as layout/panel.h has it. A warp
// walks together: it reads offs 32 at a time.
class GroupWalk {
 public:
  __device__ GroupWalk(const GemmParams& p, int unit) : p_(p), unit_(unit) {}

  int group = -1;
  int begin = 0, end = 0;  // rows
  int units_before = 0, units = 0;

  __device__ void restart() {
    group = -1;
    begin = end = units_before = units = 0;
  }

  // After the last group, the rows that no group covers.
  __device__ void next() {
    ++group;
    if (p_.offs && group < p_.groups && group % cuda::kWarp == 0) {
      const int g = group + cuda::lane_index();
      window_ = g < p_.groups ? p_.offs[g] : 0;
    }
    const int listed = p_.offs ? __shfl_sync(~0u, window_, group % cuda::kWarp) : p_.rows;
    begin = end;
    end = group < p_.groups ? max(begin, min(listed, p_.rows)) : p_.rows;
    units_before += units;
    units = ceil_div(end - begin, unit_);
  }

 private:
  const GemmParams& p_;
  int unit_, window_ = 0;
};

// A place in a ring of kSize, and how often it went round.
template <int kSize>
struct RingPlace {
  int slot = 0;
  uint32_t phase = 0;

  __device__ void advance() {
    if (++slot == kSize) {
      slot = 0;
      phase ^= 1;
    }
  }
};

// The other side: a warp, or one thread that speaks for its warp.
template <class Tile>
class WorkQueue {
 public:
  __device__ explicit WorkQueue(GemmShared<Tile>& shared) : shared_(shared) {}

  // The work after the one that was asked for last. It stays where it is until it is released.
  __device__ const Work& next() {
    mbarrier_sleep(&shared_.work_full[at_.slot], at_.phase);
    const Work& work = shared_.work[at_.slot];
    at_.advance();
    return work;
  }
  __device__ void release(const Work& work) {
    mbarrier_arrive(&shared_.work_empty[&work - shared_.work]);
  }

 private:
  GemmShared<Tile>& shared_;
  RingPlace<GemmShared<Tile>::kWorks> at_;
};

}  // namespace moxie::sm90
