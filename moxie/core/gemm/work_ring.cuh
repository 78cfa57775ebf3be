// Ring buffer of tiles from the scheduler warp (schedule_rows.cuh, schedule_wgrad.cuh) to the other
// warps. It hides the scheduler's integer divisions.
#pragma once

#include "moxie/core/base/cuda.cuh"
#include "moxie/core/gemm/gemm_params.cuh"
#include "moxie/core/ptx/mbarrier.cuh"

namespace moxie::sm90 {

// Tells the compiler that all lanes hold the same value, so that stages and descriptors live in
// uniform registers (12 % of the kernel's speed).
__device__ __forceinline__ int uniform(int value) { return __shfl_sync(~0u, value, 0); }

// A slot of a ring of kSize, and the parity of the round (the mbarrier phase).
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

// The reader's side of the ring: used by a warp, or by one thread on behalf of its warp.
template <class Tile>
class WorkRing {
 public:
  __device__ explicit WorkRing(GemmShared<Tile>& shared) : shared_(shared) {}

  // Waits for the next tile. The reference is valid until release().
  __device__ const Work& next() {
    ptx::mbarrier_sleep(&shared_.work_full[at_.slot], at_.phase);
    const Work& work = shared_.work[at_.slot];
    at_.advance();
    return work;
  }
  __device__ void release(const Work& work) {
    ptx::mbarrier_arrive(&shared_.work_empty[&work - shared_.work]);
  }

 private:
  GemmShared<Tile>& shared_;
  RingPlace<kWorks> at_;
};

}  // namespace moxie::sm90
