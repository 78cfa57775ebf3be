// The tensor maps with which wgrad loads the last step of a tile, if the padding of its group may
// hold anything. They end where the rows of the group do, and TMA reads zeros past the end of a
// map, so the kernel never sees the padding.
//
// TMA takes maps from global memory. Each CTA has room there for the maps of every tile in its ring
// of tiles. The scheduler warp makes them, long before the producer needs them.
#pragma once

#include "moxie/core/base/cuda.cuh"
#include "moxie/core/gemm/gemm_params.cuh"
#include "moxie/core/ptx/tensor_map_change.cuh"
#include "moxie/core/ptx/tma.cuh"

namespace moxie::sm90 {

// The maps of this CTA, by slot of the ring; nullptr if the padding holds zeros.
__device__ inline EndMaps* end_maps_of_cta(const GemmParams& p) {
  return p.end_maps ? p.end_maps + blockIdx.x * kWorks : nullptr;
}

// Copies the maps of the whole operands to all slots. Called by one warp.
__device__ inline void start_end_maps(const GemmParams& p, EndMaps* maps) {
  constexpr int kWords = sizeof(CUtensorMap) / sizeof(uint32_t);
  const auto words = [](auto* map) { return reinterpret_cast<uint32_t*>(map); };
  for (int slot = 0; slot < kWorks; ++slot)
    for (int i = cuda::lane_index(); i < kWords; i += cuda::kWarp) {
      words(&maps[slot].a)[i] = reinterpret_cast<const uint32_t*>(&p.a)[i];
      words(&maps[slot].b)[i] = reinterpret_cast<const uint32_t*>(&p.b)[i];
    }
  __syncwarp();
}

// Lets both maps end at k_end. Called by one thread, after TMA has read what it loads with them.
__device__ inline void set_end(EndMaps& maps, int k_end) {
  ptx::tensormap_set_size(&maps.a, static_cast<uint32_t>(k_end));
  ptx::tensormap_set_size(&maps.b, static_cast<uint32_t>(k_end));
  ptx::fence_tensormap_release();
  for (const CUtensorMap* map : {&maps.a, &maps.b}) {
    ptx::fence_tensormap_acquire(map);
    ptx::prefetch_tensormap(map);
  }
}

}  // namespace moxie::sm90
