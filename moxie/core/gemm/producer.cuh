// The producer: fills the ring of stages with TMA loads.
#pragma once

#include "moxie/core/gemm/throttle.cuh"
#include "moxie/core/gemm/work_ring.cuh"
#include "moxie/core/ptx/tma.cuh"

namespace moxie::sm90 {

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
  for (;;) {
    const Work& in_ring = ring.next();
    const Work work = in_ring;
    if (!work.valid) break;
    const int b_at = (work.group * p.b_rows_of_group + work.col) / kFold;
    for (int step = 0; step < work.k_blocks; ++step, at.advance()) {
      auto& stage = shared.stage[at.slot];
      uint64_t* full = Tile::kClears ? &shared.loaded[at.slot] : &shared.full[at.slot];
      const int k = (work.k_begin + step) * kTileK;
      if (throttles) throttle.step();
      ptx::mbarrier_sleep(&shared.empty[at.slot], at.phase ^ 1);
      ptx::mbarrier_arrive_expect_tx(full, kBytes);
      ptx::tma_load_2d_multicast(&p.a, full, stage.a + cta_in_pair * kHalf * kTileK, k,
                                 work.row + cta_in_pair * kHalf, kBoth);
      ptx::tma_load_5d(&p.b, full, stage.b, k, b_at);
      if (Tile::kClears) ptx::mbarrier_arrive(&shared.full[at.slot]);
    }
    ring.release(in_ring);
  }
  if (throttles) throttle.finish();
}

}  // namespace moxie::sm90
