// The producer: fills the ring of stages with TMA loads.
#pragma once

#include "moxie/core/gemm/throttle.cuh"
#include "moxie/core/gemm/work_ring.cuh"
#include "moxie/core/ptx/grid_dependency.cuh"
#include "moxie/core/ptx/tensor_map_change.cuh"
#include "moxie/core/ptx/tma.cuh"

namespace moxie::sm90 {

// Chooses the tensor maps of a step. The last step of a group of wgrad has maps of its own, made by
// the kernel that runs before this one, if its padding may hold anything.
template <class Tile>
class EndMaps {
 public:
  struct Maps {
    const CUtensorMap *a, *b;
  };

  __device__ explicit EndMaps(const GemmParams& p) : p_(p) {}

  __device__ __forceinline__ Maps maps_of(const Work& work, int step) {
    if (Tile::kRagged == Ragged::kRows || !p_.group_maps) return {&p_.a, &p_.b};
    const GroupMaps& of_group = p_.group_maps[work.group];
    // A ring of stages ahead, so that TMA has read the maps when it needs them.
    if (step >= work.k_blocks - Tile::kStages && !is_acquired(work.group)) {
      if (last_ < 0) ptx::wait_for_previous_kernel();
      acquire(&of_group.a);
      acquire(&of_group.b);
      last_ = work.group;
      if (last_ < 64) acquired_ |= 1ull << last_;
    }
    if (step < work.k_blocks - 1) return {&p_.a, &p_.b};
    return {&of_group.a, &of_group.b};
  }
  // Call after the last step: the maps are in memory that is freed after this kernel.
  __device__ void finish() const {
    if (Tile::kRagged == Ragged::kDepth && p_.group_maps && last_ < 0)
      ptx::wait_for_previous_kernel();
  }

 private:
  // Lets TMA use a map that an earlier kernel has made.
  static __device__ __forceinline__ void acquire(const CUtensorMap* map) {
    ptx::fence_tensormap_acquire(map);
    ptx::prefetch_tensormap(map);
  }

  __device__ __forceinline__ bool is_acquired(int group) const {
    return group < 64 ? acquired_ >> group & 1 : group == last_;
  }

  const GemmParams& p_;
  // Groups whose maps TMA may use: of the first 64 all, because a pair comes to a group twice, and
  // acquiring maps twice costs 1 % with 32 groups; of the others the last one.
  uint64_t acquired_ = 0;
  int last_ = -1;
};

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
  EndMaps<Tile> at_end(p);
  for (;;) {
    const Work& in_ring = ring.next();
    const Work work = in_ring;
    if (!work.valid) break;
    const int b_at = (work.group * p.b_rows_of_group + work.col) / kFold;
    for (int step = 0; step < work.k_blocks; ++step, at.advance()) {
      auto& stage = shared.stage[at.slot];
      uint64_t* full = &shared.full[at.slot];
      const auto maps = at_end.maps_of(work, step);
      const int k = (work.k_begin + step) * kTileK;
      if (throttles) throttle.step();
      ptx::mbarrier_sleep(&shared.empty[at.slot], at.phase ^ 1);
      ptx::mbarrier_arrive_expect_tx(full, kBytes);
      ptx::tma_load_2d_multicast(maps.a, full, stage.a + cta_in_pair * kHalf * kTileK, k,
                                 work.row + cta_in_pair * kHalf, kBoth);
      ptx::tma_load_5d(maps.b, full, stage.b, k, b_at);
    }
    ring.release(in_ring);
  }
  at_end.finish();
  if (throttles) throttle.finish();
}

}  // namespace moxie::sm90
