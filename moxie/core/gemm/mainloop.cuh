// Producer and consumers: the copy engine fills a ring of stages, two warpgroups multiply what is
// in them and promote the products, scaled, into f32 every 128 of k.
#pragma once

#include "moxie/core/gemm/scales.cuh"
#include "moxie/core/gemm/schedule.cuh"
#include "moxie/core/sm90/cluster.cuh"
#include "moxie/core/sm90/tma.cuh"
#include "moxie/core/sm90/wgmma.cuh"

namespace moxie::sm90 {

// Tells the compiler what it cannot see, that all lanes have the same value: stages and
// descriptors then live in uniform registers (12 % of the kernel's speed).
__device__ __forceinline__ int uniform(int value) { return __shfl_sync(~0u, value, 0); }

// One thread. Both CTAs of a pair need the same rows of a: each loads half of them into both.
// kFold: kernel.cuh, b_map.
template <int kFold, class Tile>
__device__ void produce(const GemmParams& p, GemmShared<Tile>& shared, int cta_in_pair) {
  constexpr int kHalf = Tile::kM / kCluster;
  constexpr uint16_t kBoth = (1 << kCluster) - 1;
  constexpr uint32_t kBytes = (Tile::kM + kTileN) * kTileK;
  WorkQueue<Tile> queue(shared);
  RingPlace<Tile::kStages> at;
  for (;;) {
    const Work& queued = queue.next();
    const Work work = queued;
    if (!work.valid) break;
    const int b_at = (work.group * p.b_rows_of_group + work.col) / kFold;
    for (int step = 0; step < work.k_blocks; ++step, at.advance()) {
      auto& stage = shared.stage[at.slot];
      uint64_t* full = &shared.full[at.slot];
      const int k = (work.k_begin + step) * kTileK;
      mbarrier_wait(&shared.empty[at.slot], at.phase ^ 1);
      mbarrier_arrive_expect_tx(full, kBytes);
      tma_load_2d_multicast(&p.a, full, stage.a + cta_in_pair * kHalf * kTileK, k,
                            work.row + cta_in_pair * kHalf, kBoth);
      tma_load_5d(&p.b, full, stage.b, k, b_at);
    }
    queue.release(queued);
  }
}

// What a consumer thread holds of a tile; wgmma.cuh says which rows and columns.
template <class Tile>
using Sums = float[Tile::kWaves][64];

template <Ragged kRagged, class Tile>
class Consumer {
 public:
  __device__ Consumer(const GemmParams& p, GemmShared<Tile>& shared)
      : shared_(shared), queue_(shared), scales_(p), warpgroup_(uniform(cuda::warp_index() / 4)) {}

  // Calls store(work, sums) for each tile.
  template <class Store>
  __device__ void run(Store&& store) {
    const Work* work = start_next();
    while (uniform(work->valid)) {
      Sums<Tile> sums;
#pragma unroll
      for (auto& wave : sums)
#pragma unroll
        for (float& sum : wave) sum = 0.f;
      const Work* next = multiply(*work, sums);
      store(*work, sums);
      __syncwarp();
      if (cuda::lane_index() == 0) queue_.release(*work);
      work = next;
    }
  }

 private:
  // The loads of its first scales are then under way.
  __device__ const Work* start_next() {
    const Work& next = queue_.next();
    scales_.start(next);
    return &next;
  }

  // Returns the work that follows.
  __device__ const Work* multiply(const Work& work, Sums<Tile>& sums) {
    const int steps = uniform(work.k_blocks);
    // 64 rows at a time, taken by the warpgroups in turn; those past the last are left out.
    const int live = uniform(ceil_div(work.rows - warpgroup_ * kWgmmaM, kWgmmaM * kConsumers));
    if (live <= 0 || steps == 0) {
      for (int step = 0; step < steps; ++step, at_.advance()) {
        mbarrier_wait(&shared_.full[at_.slot], at_.phase);
        release();
      }
      return start_next();
    }
    const Work* next = nullptr;
    for (int step = 0; step < steps; step += kQuad) {
      const int count = min(steps - step, kQuad);
      scales_.take(count);
      if (steps - step > kQuad)
        scales_.turn();
      else
        next = start_next();
      // Separate loops, so that the usual one is short and straight: jumps over code that is not
      // taken cost 6 % when they were inside.
      if (uniform(scales_.wild()))
        quad<Tile::kWaves, true>(work, step, count, sums);
      else if (live >= Tile::kWaves)
        quad<Tile::kWaves, false>(work, step, count, sums);
      else
        quad<1, false>(work, step, count, sums);
    }
    return next;
  }

  template <int kWaves, bool kWild>
  __device__ __forceinline__ void quad(const Work& work, int first, int count, Sums<Tile>& sums) {
#pragma unroll 1
    for (int i = 0; i < count; ++i, at_.advance()) {
      mbarrier_wait(&shared_.full[at_.slot], at_.phase);
      const auto& stage = shared_.stage[at_.slot];
      const uint64_t b = wgmma_descriptor(stage.b);
      const uint64_t a = wgmma_descriptor(stage.a + warpgroup_ * kWgmmaM * kTileK);
#pragma unroll
      for (int wave = 0; wave < kWaves; ++wave) {
        // Descriptors count in 16 bytes.
        constexpr int kNextK = kWgmmaK / 16, kNextWave = kConsumers * kWgmmaM * kTileK / 16;
        float product[64];
        keep_in_registers(product);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < kTileK / kWgmmaK; ++k)
          wgmma_m64n128k32(product, a + wave * kNextWave + k * kNextK, b + k * kNextK, k != 0);
        wgmma_commit_group();
        wgmma_wait_group<0>();
        keep_in_registers(product);
        if (wave + 1 == kWaves) release();
        if constexpr (kWild)
          promote_wild(work, first + i, wave, product, sums[wave]);
        else
          promote(wave, product, sums[wave]);
      }
      scales_.step();
    }
  }

  __device__ __forceinline__ void promote(int wave, const float (&product)[64], float (&sums)[64]) {
#pragma unroll
    for (int i = 0; i < 64; ++i)
      sums[i] = fmaf(product[i], scales_.scale(wave, i / 2 % 2, i / kPerColumn), sums[i]);
  }

  __device__ __forceinline__ void promote_wild(const Work& work, int step, int wave,
                                               const float (&product)[64], float (&sums)[64]) {
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int j = 0; j < Scales<kRagged, Tile>::kColumns; ++j) {
        const float2 scale = scales_.wild_scale(work, step, wave, half, j);
#pragma unroll
        for (int i = j * kPerColumn; i < (j + 1) * kPerColumn; ++i)
          if (i / 2 % 2 == half) sums[i] = fmaf(product[i] * scale.x, scale.y, sums[i]);
      }
  }

  // The stage is free once every warp of both CTAs has said so: a was loaded by both.
  __device__ __forceinline__ void release() {
    const auto cta = static_cast<uint32_t>(cuda::lane_index());
    if (cta < kCluster) mbarrier_arrive_cluster(&shared_.empty[at_.slot], cta);
  }

  static constexpr int kPerColumn = Scales<kRagged, Tile>::kPerColumn;

  GemmShared<Tile>& shared_;
  WorkQueue<Tile> queue_;
  Scales<kRagged, Tile> scales_;
  RingPlace<Tile::kStages> at_;
  int warpgroup_;
};

}  // namespace moxie::sm90
