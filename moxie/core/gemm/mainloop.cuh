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

  // Calls store(work, sums) for each tile. The first product of the next one is under way then.
  template <class Store>
  __device__ __forceinline__ void run(Store&& store) {
    Product product;
    Sums<Tile> sums;
    const Work* work = start_next();
    begin(*work, product);
    while (uniform(work->valid)) {
#pragma unroll
      for (auto& wave : sums)
#pragma unroll
        for (float& sum : wave) sum = 0.f;
      const Work* next = multiply(*work, product, sums);
      begin(*next, product);
      store(*work, sums);
      __syncwarp();
      if (cuda::lane_index() == 0) queue_.release(*work);
      work = next;
    }
  }

 private:
  using Product = float[64];
  using MyScales = Scales<kRagged, Tile>;
  struct Operands {
    uint32_t a, b;  // wgmma_operand
  };

  // The loads of its first scales are then under way.
  __device__ __forceinline__ const Work* start_next() {
    const Work& next = queue_.next();
    scales_.start(next);
    return &next;
  }

  // 64 rows at a time, taken by the warpgroups in turn; those past the last are left out.
  __device__ __forceinline__ int live_waves(const Work& work) const {
    return uniform(ceil_div(work.rows - warpgroup_ * kWgmmaM, kWgmmaM * kConsumers));
  }

  // Issues the first product, so that the pipe has work while the tile before is stored.
  __device__ __forceinline__ void begin(const Work& work, Product& product) {
    if (live_waves(work) <= 0 || uniform(work.k_blocks) <= 0) return;
    mbarrier_wait(&shared_.full[at_.slot], at_.phase);
    issue(operands(), 0, product);
  }

  // Returns the work that follows.
  __device__ __forceinline__ const Work* multiply(const Work& work, Product& product,
                                                  Sums<Tile>& sums) {
    const int steps = uniform(work.k_blocks), live = live_waves(work);
    if (live <= 0 || steps == 0) {
      for (int step = 0; step < steps; ++step, at_.advance()) {
        mbarrier_wait(&shared_.full[at_.slot], at_.phase);
        release(at_.slot);
      }
      return start_next();
    }
    const Work* next = nullptr;
    Operands of = operands();
    for (int left = steps; left > 0; left -= kQuad) {
      scales_.take(left);
      if (left > kQuad)
        scales_.turn();
      else
        next = start_next();
      // Separate loops, so that the usual one is short and straight: jumps over code that is not
      // taken cost 6 % when they were inside.
      if (uniform(scales_.wild()))
        quad<Tile::kWaves, true>(work, steps, left, of, product, sums);
      else if (live >= Tile::kWaves)
        quad<Tile::kWaves, false>(work, steps, left, of, product, sums);
      else
        quad<1, false>(work, steps, left, of, product, sums);
    }
    return next;
  }

  __device__ __forceinline__ Operands operands() const {
    const auto& stage = shared_.stage[at_.slot];
    return {wgmma_operand(stage.a + warpgroup_ * kWgmmaM * kTileK), wgmma_operand(stage.b)};
  }

  __device__ __forceinline__ void issue(const Operands& of, int wave, Product& product) {
    // Operands count in 16 bytes.
    constexpr int kNextK = kWgmmaK / 16, kNextWave = kConsumers * kWgmmaM * kTileK / 16;
    keep_in_registers(product);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kTileK / kWgmmaK; ++k)
      wgmma_m64n128k32(product, of.a + wave * kNextWave + k * kNextK, of.b + k * kNextK, k != 0);
    wgmma_commit_group();
  }

  // At most four steps, `left` being left of the tile. The first product of the first is under way,
  // and in the end that of the step after the last, if there is one.
  template <int kWaves, bool kWild>
  __device__ __forceinline__ void quad(const Work& work, int steps, int left, Operands& of,
                                       Product& product, Sums<Tile>& sums) {
    const int last = max(left - kQuad, 0);
#pragma unroll 1
    do {
      --left;
      const int done = at_.slot;
#pragma unroll
      for (int wave = 0; wave < kWaves; ++wave) {
        typename MyScales::Factors factors;
        if constexpr (!kWild) scales_.factors(wave, factors);
        // While the last product of the step is under way: between two every instruction counts.
        if (wave + 1 == kWaves) {
          scales_.step();
          at_.advance();
          if (left > 0) mbarrier_wait(&shared_.full[at_.slot], at_.phase);
        }
        wgmma_wait_group<0>();
        keep_in_registers(product);
        if (wave + 1 == kWaves) {
          release(done);
          of = operands();
        }
        if constexpr (kWild)
          promote_wild(work, steps - left - 1, wave, product, sums[wave]);
        else
          promote(factors, product, sums[wave]);
        if (wave + 1 < kWaves)
          issue(of, wave + 1, product);
        else if (left > 0)
          issue(of, 0, product);
      }
    } while (left > last);
  }

  __device__ __forceinline__ void promote(const typename MyScales::Factors& factors,
                                          const Product& product, float (&sums)[64]) {
#pragma unroll
    for (int i = 0; i < 64; ++i)
      sums[i] = fmaf(product[i], factors[i / 2 % 2][i / kPerColumn], sums[i]);
  }

  __device__ __forceinline__ void promote_wild(const Work& work, int step, int wave,
                                               const Product& product, float (&sums)[64]) {
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int j = 0; j < MyScales::kColumns; ++j) {
        const float2 scale = scales_.wild_scale(work, step, wave, half, j);
#pragma unroll
        for (int i = j * kPerColumn; i < (j + 1) * kPerColumn; ++i)
          if (i / 2 % 2 == half) sums[i] = fmaf(product[i] * scale.x, scale.y, sums[i]);
      }
  }

  // The stage is free once every warp of both CTAs has said so: a was loaded by both.
  __device__ __forceinline__ void release(int slot) {
    const auto cta = static_cast<uint32_t>(cuda::lane_index());
    if (cta < kCluster) mbarrier_arrive_cluster(&shared_.empty[slot], cta);
  }

  static constexpr int kPerColumn = MyScales::kPerColumn;

  GemmShared<Tile>& shared_;
  WorkQueue<Tile> queue_;
  MyScales scales_;
  RingPlace<Tile::kStages> at_;
  int warpgroup_;
};

}  // namespace moxie::sm90
