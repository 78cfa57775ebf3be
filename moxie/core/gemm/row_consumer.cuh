// Consumers of forward and dgrad: one wave each, scales from shared memory.
#pragma once

#include "moxie/core/gemm/consumer.cuh"
#include "moxie/core/gemm/scaler.cuh"

namespace moxie::sm90 {

template <class Tile>
class RowConsumer {
 public:
  __device__ RowConsumer(const GemmParams& p, GemmShared<Tile>& shared)
      : p_(p), shared_(shared), queue_(shared), stages_(shared) {}

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
        multiply(now, next.waves > 0, product, sums[0]);
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
  __device__ __forceinline__ void multiply(const Now& tile, bool next_live, Product& product,
                                           Product& sums) {
    int left = tile.steps;
    while (left > 0) {
      if (is_wild(shared_.scales[stages_.slot()])) {
        wild_step(*tile.work, tile.steps - left, product, sums);
        if (--left > 0 || next_live) {
          stages_.wait();
          issue<Tile>(stages_.operands(), 0, product);
        }
      } else if (left >= kQuad) {
        // The usual steps have this loop to themselves, short and straight: a consumer issues every
        // second clock at best, and jumps over rare code cost 6 %.
#pragma unroll 1
        do steps<kQuad>(left, next_live, product, sums);
        while (left >= kQuad && !is_wild(shared_.scales[stages_.slot()]));
      } else {
        steps<1>(left, next_live, product, sums);
      }
    }
  }

  // Tame ones. While a product is under way everything else is made ready: between two of them
  // every instruction counts.
  template <int kSteps>
  __device__ __forceinline__ void steps(int& left, bool next_live, Product& product,
                                        Product& sums) {
    left -= kSteps;
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const bool more = i + 1 < kSteps || left > 0 || next_live;
      const int done = stages_.slot();
      float factors[2][1];
      scales_.factors(shared_.scales[done], factors);
      stages_.advance();
      if (more) stages_.wait();
      const Operands of = stages_.operands();
      finish(product);
      stages_.release(done);
      promote(factors, product, sums);
      if (more) issue<Tile>(of, 0, product);
    }
  }

  __device__ __forceinline__ void wild_step(const Work& work, int step, Product& product,
                                            Product& sums) {
    const int done = stages_.slot(), b = *codes_of(p_.scale_b, b_code_row(p_, work, kTileN), step);
    finish(product);
    const auto factors = [&](int half, int) {
      const int64_t row = work.row + Rows<Tile>::of_thread(0) + half * 8;
      return wild_factors(*codes_of(p_.scale_a, row, step), b);
    };
    promote_wild<1>(factors, product, sums);
    stages_.release(done);
    stages_.advance();
  }

  const GemmParams& p_;
  GemmShared<Tile>& shared_;
  WorkQueue<Tile> queue_;
  RowScales<Tile> scales_;
  Stages<Tile> stages_;
};

}  // namespace moxie::sm90
