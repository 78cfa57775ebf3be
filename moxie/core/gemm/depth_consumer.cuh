// Consumers of wgrad: scales are their own business.
#pragma once

#include "moxie/core/gemm/consumer.cuh"
#include "moxie/core/gemm/lane_scales.cuh"

namespace moxie::sm90 {

template <class Tile>
class DepthConsumer {
 public:
  __device__ DepthConsumer(const GemmParams& p, GemmShared<Tile>& shared)
      : queue_(shared), scales_(p), stages_(shared) {}

  // Calls store(work, sums) for each tile. The first product of the next one is under way then.
  template <class Store>
  __device__ __forceinline__ void run(Store&& store) {
    Product product;
    Sums<Tile> sums;
    const Work* work = start_next();
    begin(*work, product);
    while (uniform(work->valid)) {
      clear<Tile>(sums);
      const Work* next = multiply(*work, product, sums);
      begin(*next, product);
      store(*work, sums);
      __syncwarp();
      if (cuda::lane_index() == 0) queue_.release(*work);
      work = next;
    }
  }

 private:
  using Scales = LaneScales<Tile>;

  // The loads of its first scales are then under way.
  __device__ __forceinline__ const Work* start_next() {
    const Work& next = queue_.next();
    scales_.start(next);
    return &next;
  }

  // Issues the first product, so that the pipe has work while the tile before is stored.
  __device__ __forceinline__ void begin(const Work& work, Product& product) {
    if (stages_.live_waves(work) <= 0 || uniform(work.k_blocks) <= 0) return;
    stages_.wait();
    issue<Tile>(stages_.operands(), 0, product);
  }

  // Returns the work that follows.
  __device__ __forceinline__ const Work* multiply(const Work& work, Product& product,
                                                  Sums<Tile>& sums) {
    const int steps = uniform(work.k_blocks), live = stages_.live_waves(work);
    if (live <= 0 || steps == 0) {
      stages_.skip(steps);
      return start_next();
    }
    const Work* next = nullptr;
    Operands of = stages_.operands();
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

  // At most four steps, `left` being left of the tile. The first product of the first is under way,
  // and in the end that of the step after the last, if there is one.
  template <int kWaves, bool kWild>
  __device__ __forceinline__ void quad(const Work& work, int steps, int left, Operands& of,
                                       Product& product, Sums<Tile>& sums) {
    const int last = max(left - kQuad, 0);
#pragma unroll 1
    do {
      --left;
      const int done = stages_.slot();
#pragma unroll
      for (int wave = 0; wave < kWaves; ++wave) {
        typename Scales::Factors factors;
        if constexpr (!kWild) scales_.factors(wave, factors);
        // While the last product of the step is under way: between two every instruction counts.
        if (wave + 1 == kWaves) {
          scales_.step();
          stages_.advance();
          if (left > 0) stages_.wait();
        }
        finish(product);
        if (wave + 1 == kWaves) {
          stages_.release(done);
          of = stages_.operands();
        }
        if constexpr (kWild) {
          const auto wild = [&](int half, int span) {
            return scales_.wild_factors(work, steps - left - 1, wave, half, span);
          };
          promote_wild<Scales::kSpans>(wild, product, sums[wave]);
        } else {
          promote(factors, product, sums[wave]);
        }
        if (wave + 1 < kWaves)
          issue<Tile>(of, wave + 1, product);
        else if (left > 0)
          issue<Tile>(of, 0, product);
      }
    } while (left > last);
  }

  WorkQueue<Tile> queue_;
  Scales scales_;
  Stages<Tile> stages_;
};

}  // namespace moxie::sm90
