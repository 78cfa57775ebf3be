// The producer: fills the ring of stages with TMA loads.
#pragma once

#include "moxie/core/gemm/throttle.cuh"
#include "moxie/core/gemm/work_ring.cuh"
#include "moxie/core/ptx/tensor_map_change.cuh"
#include "moxie/core/ptx/tma.cuh"

namespace moxie::sm90 {

// Lets TMA use a map that an earlier kernel has made.
__device__ __forceinline__ void acquire(const CUtensorMap* map) {
  ptx::fence_tensormap_acquire(map);
  ptx::prefetch_tensormap(map);
}

// Runs in one thread. Both CTAs of a pair need the same rows of a: each loads half of them and
// multicasts it to both. kFold: see b_map in gemm_kernel.cuh.
template <int kFold, class Tile>
__device__ void produce(const GemmParams& p, GemmShared<Tile>& shared, int cta_in_pair) {
  constexpr int kHalf = Tile::kM / kCluster;
  constexpr uint16_t kBoth = (1 << kCluster) - 1;
  constexpr uint32_t kBytes = (Tile::kM + kTileN) * kTileK;
  WorkRing<Tile> ring(shared);
  RingPlace<Tile::kStages> at;
  const bool throttles = Tile::kRagged == Ragged::kDepth && cta_in_pair == 0;
  Throttle throttle(throttle_counters[p.throttle], static_cast<int>(gridDim.x) / kCluster);
  int acquired = -1;  // the group whose maps TMA may use
  for (;;) {
    const Work& in_ring = ring.next();
    const Work work = in_ring;
    if (!work.valid) break;
    const CUtensorMap *a_at_end = &p.a, *b_at_end = &p.b;  // for the last step
    if (Tile::kRagged == Ragged::kDepth && p.group_maps) {
      a_at_end = &p.group_maps[work.group].a;
      b_at_end = &p.group_maps[work.group].b;
      if (work.group != acquired) {
        acquire(a_at_end);
        acquire(b_at_end);
        acquired = work.group;
      }
    }
    const int b_at = (work.group * p.b_rows_of_group + work.col) / kFold;
    for (int step = 0; step < work.k_blocks; ++step, at.advance()) {
      auto& stage = shared.stage[at.slot];
      uint64_t* full = &shared.full[at.slot];
      const bool is_last = step == work.k_blocks - 1;
      const int k = (work.k_begin + step) * kTileK;
      if (throttles) throttle.step();
      ptx::mbarrier_sleep(&shared.empty[at.slot], at.phase ^ 1);
      ptx::mbarrier_arrive_expect_tx(full, kBytes);
      ptx::tma_load_2d_multicast(is_last ? a_at_end : &p.a, full,
                                 stage.a + cta_in_pair * kHalf * kTileK, k,
                                 work.row + cta_in_pair * kHalf, kBoth);
      ptx::tma_load_5d(is_last ? b_at_end : &p.b, full, stage.b, k, b_at);
    }
    ring.release(in_ring);
  }
  if (throttles) throttle.finish();
}

}  // namespace moxie::sm90
