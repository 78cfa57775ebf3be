// The producer: fills the ring of stages with TMA loads.
#pragma once

#include "moxie/core/gemm/end_maps.cuh"
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
  EndMaps* const end_maps = Tile::kRagged == Ragged::kDepth ? end_maps_of_cta(p) : nullptr;
  for (;;) {
    const Work& in_ring = ring.next();
    const Work work = in_ring;
    if (!work.valid) break;
    const EndMaps* const at_end = end_maps ? &end_maps[&in_ring - shared.work] : nullptr;
    const int b_at = (work.group * p.b_rows_of_group + work.col) / kFold;
    for (int step = 0; step < work.k_blocks; ++step, at.advance()) {
      auto& stage = shared.stage[at.slot];
      uint64_t* full = &shared.full[at.slot];
      const bool ends = at_end && step == work.k_blocks - 1;
      const int k = (work.k_begin + step) * kTileK;
      if (throttles) throttle.step();
      ptx::mbarrier_sleep(&shared.empty[at.slot], at.phase ^ 1);
      ptx::mbarrier_arrive_expect_tx(full, kBytes);
      ptx::tma_load_2d_multicast(ends ? &at_end->a : &p.a, full,
                                 stage.a + cta_in_pair * kHalf * kTileK, k,
                                 work.row + cta_in_pair * kHalf, kBoth);
      ptx::tma_load_5d(ends ? &at_end->b : &p.b, full, stage.b, k, b_at);
    }
    ring.release(in_ring);
  }
  if (throttles) throttle.finish();
}

}  // namespace moxie::sm90
