// Consumers of forward and dgrad: one wave each, scales from shared memory.
#pragma once

#include "moxie/core/gemm/consumer.cuh"
#include "moxie/core/gemm/scaler.cuh"

namespace moxie::sm90 {

template <class Tile>
class RowConsumer {
 public:
  __device__ RowConsumer(const GemmParams&, GemmShared<Tile>& shared)
      : shared_(shared), queue_(shared), stages_(shared) {}

  // Calls store(work, sums) for each tile. The first product of the next one is under way then.
  template <class Store>
  __device__ __forceinline__ void run(Store&& store) {
    Product product;
    Sums<Tile> sums;
    Now now = next_tile();
    begin(now, product);
    while (now.valid) {
      clear<Tile>(sums);
      const Now next = next_tile();
      if (now.waves <= 0)
        stages_.skip(now.steps);
      else
        multiply(now.steps, next.waves > 0, product, sums[0]);
      if (now.waves <= 0) begin(next, product);
      store(*now.work, sums);
      __syncwarp();
      if (cuda::lane_index() == 0) queue_.release(*now.work);
      now = next;
    }
  }

 private:
  static_assert(Tile::kWaves == 1);

  struct Now {
    const Work* work;
    int valid, steps;
    int waves;  // that this warpgroup multiplies, one or none; a bool would not stay uniform
  };

  __device__ __forceinline__ Now next_tile() {
    const Work& work = queue_.next();
    const int steps = uniform(work.k_blocks);
    const int waves = stages_.live_waves(work);
    return {&work, uniform(work.valid), steps, steps > 0 ? waves : 0};
  }

  // Issues the first product, so that the pipe has work while the tile before is stored.
  __device__ __forceinline__ void begin(const Now& tile, Product& product) {
    if (tile.waves <= 0) return;
    stages_.wait();
    issue<Tile>(stages_.operands(), 0, product);
  }

  // The first product is under way; in the end that of the next tile is, if that is live.
  __device__ __forceinline__ void multiply(int left, bool next_live, Product& product,
                                           Product& sums) {
    while (left > 0)
      if (multiply_tame(left, next_live, product, sums)) {
        promote_wild_step(product, sums);
        --left;
        if (left > 0 || next_live) {
          stages_.wait();
          issue<Tile>(stages_.operands(), 0, product);
        }
      }
  }

  // Returns whether it stopped before a wild step. The usual steps have this loop to themselves,
  // short and straight: jumps over rare code cost 6 %.
  __device__ __forceinline__ bool multiply_tame(int& left, bool next_live, Product& product,
                                                Product& sums) {
    bool wild;
#pragma unroll 1
    do {
      // While a product is under way: between two of them every instruction counts.
      const int done = stages_.slot();
      const RowScales<Tile> scales(shared_.scales[done]);
      float factors[2][1];
      scales.factors(factors);
      wild = scales.wild();
      if (wild) break;
      stages_.advance();
      --left;
      const bool more = left > 0 || next_live;
      if (more) stages_.wait();
      const Operands of = stages_.operands();
      finish(product);
      stages_.release(done);
      promote(factors, product, sums);
      if (more) issue<Tile>(of, 0, product);
    } while (left > 0);
    return wild;
  }

  __device__ __forceinline__ void promote_wild_step(Product& product, Product& sums) {
    const int done = stages_.slot();
    const RowScales<Tile> scales(shared_.scales[done]);
    finish(product);
    promote_wild<1>([&](int half, int) { return scales.wild_factors(half); }, product, sums);
    __syncwarp();  // the scales have been read
    stages_.release(done);
    stages_.advance();
  }

  GemmShared<Tile>& shared_;
  WorkQueue<Tile> queue_;
  Stages<Tile> stages_;
};

}  // namespace moxie::sm90
