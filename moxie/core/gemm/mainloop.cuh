// The main loop of a consumer warpgroup: multiply a stage with wgmma, then promote (scale and add)
// the product into f32 sums.
#pragma once

#include "moxie/core/gemm/work_ring.cuh"
#include "moxie/core/ptx/wgmma.cuh"

namespace moxie::sm90 {

// One thread's part of a 64 x 128 product or of its sums; wgmma.cuh says which rows and columns.
using Product = float[64];

// The low words (wgmma_descriptor_low) of the descriptors of one stage's operands.
struct StageDescriptors {
  uint32_t a, b;
};

// A consumer warpgroup's side of the ring of stages. Addresses are computed once, for stage 0.
template <class Tile>
class Stages {
 public:
  __device__ explicit Stages(GemmShared<Tile>& shared)
      : shared_(shared), warpgroup_(uniform(cuda::warp_index() / 4)) {
    auto& stage = shared.stage[0];
    first_ = {static_cast<uint32_t>(
                  uniform(ptx::wgmma_descriptor_low(stage.a + warpgroup_ * kWgmmaM * kTileK))),
              static_cast<uint32_t>(uniform(ptx::wgmma_descriptor_low(stage.b)))};
    first_empty_ = ptx::cluster_address(&shared.empty[0], cuda::lane_index() % kCluster);
  }

  __device__ __forceinline__ int slot() const { return at_.slot; }
  __device__ __forceinline__ void advance() { at_.advance(); }
  __device__ __forceinline__ void wait() { ptx::mbarrier_wait(&shared_.full[at_.slot], at_.phase); }
  // A stage is free once every consumer warp of both CTAs has arrived, because both CTAs load a.
  // Lane i arrives at CTA i on behalf of its warp, after all lanes have read the stage's scales.
  __device__ __forceinline__ void release(int slot) {
    __syncwarp();
    if (cuda::lane_index() < kCluster)
      ptx::mbarrier_arrive_cluster(first_empty_ + static_cast<uint32_t>(slot * sizeof(uint64_t)));
  }
  // Passes over the stages of a tile in which this warpgroup has no rows.
  __device__ __forceinline__ void skip(int steps) {
    for (int step = 0; step < steps; ++step, advance()) {
      wait();
      release(slot());
    }
  }

  // The tile's rows from this warpgroup's first row on; <= 0 if it has none.
  __device__ __forceinline__ int rows_of(const Work& work) const {
    return uniform(work.rows - warpgroup_ * kWgmmaM);
  }
  __device__ __forceinline__ StageDescriptors descriptors() const {
    constexpr uint32_t kStage = sizeof(typename GemmShared<Tile>::Stage) / ptx::kDescriptorUnit;
    return {first_.a + at_.slot * kStage, first_.b + at_.slot * kStage};
  }

 private:
  GemmShared<Tile>& shared_;
  RingPlace<Tile::kStages> at_;
  int warpgroup_;
  StageDescriptors first_;
  uint32_t first_empty_;
};

__device__ __forceinline__ void issue(const StageDescriptors& of, Product& product) {
  constexpr int kNextK = kWgmmaK / ptx::kDescriptorUnit;
  ptx::keep_in_registers(product);
  ptx::wgmma_fence();
#pragma unroll
  for (int k = 0; k < kTileK / kWgmmaK; ++k)
    ptx::wgmma_m64n128k32(product, of.a + k * kNextK, of.b + k * kNextK, k != 0);
  ptx::wgmma_commit_group();
}

__device__ __forceinline__ void finish(Product& product) {
  ptx::wgmma_wait_group<0>();
  ptx::keep_in_registers(product);
}

enum class Promotion { kFirst, kAdd };  // sums = scaled product, or sums += scaled product

// Promotes a product. factors[half][span] is for one of the thread's two rows and one span of
// columns that shares a scale of b.
template <Promotion kPromotion, int kSpans>
__device__ __forceinline__ void promote(const float (&factors)[2][kSpans], const Product& product,
                                        Product& sums) {
  constexpr int kPerSpan = 64 / kSpans;
#pragma unroll
  for (int i = 0; i < 64; ++i) {
    const float factor = factors[i / 2 % 2][i / kPerSpan];
    sums[i] =
        kPromotion == Promotion::kFirst ? product[i] * factor : fmaf(product[i], factor, sums[i]);
  }
}

// promote() for arbitrary scales: factors(half, span) returns wild_factors().
template <int kSpans, class Factors>
__device__ __forceinline__ void promote_wild(Factors&& factors, const Product& product,
                                             Product& sums) {
  constexpr int kPerSpan = 64 / kSpans;
#pragma unroll
  for (int half = 0; half < 2; ++half)
#pragma unroll
    for (int span = 0; span < kSpans; ++span) {
      const float2 factor = factors(half, span);
#pragma unroll
      for (int i = span * kPerSpan; i < (span + 1) * kPerSpan; ++i)
        if (i / 2 % 2 == half) sums[i] = fmaf(product[i] * factor.x, factor.y, sums[i]);
    }
}

}  // namespace moxie::sm90
