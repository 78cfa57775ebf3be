// The copy engine's commands: it fills the ring of stages.
#pragma once

#include "moxie/core/gemm/pace.cuh"
#include "moxie/core/gemm/schedule.cuh"
#include "moxie/core/ptx/tma.cuh"

namespace moxie::sm90 {

// One thread. Both CTAs of a pair need the same rows of a: each loads half of them into both.
// kFold: kernel.cuh, b_map.
template <int kFold, class Tile>
__device__ void produce(const GemmParams& p, GemmShared<Tile>& shared, int cta_in_pair) {
  constexpr int kHalf = Tile::kM / kCluster;
  constexpr uint16_t kBoth = (1 << kCluster) - 1;
  constexpr uint32_t kBytes = (Tile::kM + kTileN) * kTileK;
  WorkQueue<Tile> queue(shared);
  RingPlace<Tile::kStages> at;
  const bool paces = Tile::kRagged == Ragged::kDepth && cta_in_pair == 0;
  Pace pace(pace_counters[p.pace], static_cast<int>(gridDim.x) / kCluster);
  for (;;) {
    const Work& queued = queue.next();
    const Work work = queued;
    if (!work.valid) break;
    const int b_at = (work.group * p.b_rows_of_group + work.col) / kFold;
    for (int step = 0; step < work.k_blocks; ++step, at.advance()) {
      auto& stage = shared.stage[at.slot];
      uint64_t* full = &shared.full[at.slot];
      const int k = (work.k_begin + step) * kTileK;
      if (paces) pace.step();
      ptx::mbarrier_sleep(&shared.empty[at.slot], at.phase ^ 1);
      ptx::mbarrier_arrive_expect_tx(full, kBytes);
      ptx::tma_load_2d_multicast(&p.a, full, stage.a + cta_in_pair * kHalf * kTileK, k,
                                 work.row + cta_in_pair * kHalf, kBoth);
      ptx::tma_load_5d(&p.b, full, stage.b, k, b_at);
    }
    queue.release(queued);
  }
  if (paces) pace.finish();
}

}  // namespace moxie::sm90
