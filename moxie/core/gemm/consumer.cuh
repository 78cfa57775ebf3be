// Consumers: two or three warpgroups that multiply, promote the product after every step (128 of
// k), and hand the sums to the epilogue.
//
// Instruction issue is the bottleneck: while wgmma occupies the register file, a warp issues at
// most every second clock. So every instruction of a step counts, and steps are unrolled by four.
#pragma once

#include "moxie/core/gemm/mainloop.cuh"
#include "moxie/core/gemm/scale_warp.cuh"

namespace moxie::sm90 {

template <class Tile>
class Consumer {
 public:
  __device__ Consumer(const GemmParams& p, GemmShared<Tile>& shared)
      : p_(p), shared_(shared), ring_(shared), stages_(shared) {}

  // Calls store(work, sums) for each tile. store() overlaps the first product of the next tile, if
  // that tile has rows for this warpgroup.
  template <class Store>
  __device__ __forceinline__ void run(Store&& store) {
    Product product, sums;
    Now now = next_tile();
    begin(now, product);
    while (now.valid) {
      const Now next = next_tile();
      if (now.rows > 0) {
        multiply(now, next.rows > 0, product, sums);
      } else {
        ptx::clear_registers(sums);
        stages_.skip(now.steps);
        begin(next, product);
      }
      store(*now.work, sums);
      __syncwarp();
      if (cuda::lane_index() == 0) ring_.release(*now.work);
      now = next;
    }
  }

 private:
  struct Now {
    const Work* work;
    int valid, steps;
    int rows;  // of the tile, from this warpgroup's first row on; <= 0 if it has none
  };

  __device__ __forceinline__ Now next_tile() {
    const Work& work = ring_.next();
    const int steps = uniform(work.k_blocks);
    const int rows = stages_.rows_of(work);
    return {&work, uniform(work.valid), steps, steps > 0 ? rows : 0};
  }

  // Issues a tile's first product, which runs while the previous tile is stored.
  __device__ __forceinline__ void begin(const Now& tile, Product& product) {
    if (tile.rows <= 0) return;
    stages_.wait();
    issue(stages_.descriptors(), product);
  }

  // Takes all steps of a tile. On entry the tile's first product is in flight; on return the next
  // tile's first product is, if next_live. A product stays in flight between any two steps.
  __device__ __forceinline__ void multiply(const Now& tile, bool next_live, Product& product,
                                           Product& sums) {
    int left = tile.steps;
    // With four scales of b (kSpans), Promotion::kFirst would make the compiler multiply in place,
    // and wait for wgmma in every step.
    if (Tile::kSpans > 1 || next_is_wild()) {
      ptx::clear_registers(sums);
    } else if (left >= kQuad) {
      left -= kQuad;
      steps<kQuad, Promotion::kFirst>(left, next_live, product, sums);
    } else {
      left -= 1;
      steps<1, Promotion::kFirst>(left, next_live, product, sums);
    }
    while (left > 0) {
      if (next_is_wild()) {
        wild_step(*tile.work, tile.steps - left, product, sums);
        left -= 1;
        if (left > 0 || next_live) {
          stages_.wait();
          issue(stages_.descriptors(), product);
        }
      } else if (left >= kQuad) {
        // This loop has the common case alone, because jumps over the rare code cost 6 %.
#pragma unroll 1
        do {
          left -= kQuad;
          steps<kQuad, Promotion::kAdd>(left, next_live, product, sums);
        } while (left >= kQuad && !next_is_wild());
      } else if (Tile::kSpans > 1 && left >= 2) {  // pairs of steps make forward 0.5 % slower
        left -= 2;
        steps<2, Promotion::kAdd>(left, next_live, product, sums);
      } else {
        left -= 1;
        steps<1, Promotion::kAdd>(left, next_live, product, sums);
      }
    }
  }

  __device__ __forceinline__ bool next_is_wild() const {
    return is_wild(shared_.scales[stages_.slot()]);
  }

  // Takes kSteps steps without wild scales. Each step waits for the product in flight, promotes it
  // and issues the next one; everything else is prepared while the product is in flight. The last
  // step issues a product only if steps of this tile are left after it, or if next_live.
  template <int kSteps, Promotion kFirstPromotion>
  __device__ __forceinline__ void steps(int left, bool next_live, Product& product, Product& sums) {
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const bool more = i + 1 < kSteps || left > 0 || next_live;
      const int done = stages_.slot();
      typename StepFactors<Tile>::Factors factors;
      factors_.read(shared_.scales[done], factors);
      stages_.advance();
      if (more) stages_.wait();
      const StageDescriptors of = stages_.descriptors();
      finish(product);
      stages_.release(done);
      if (i == 0)
        promote<kFirstPromotion>(factors, product, sums);
      else
        promote<Promotion::kAdd>(factors, product, sums);
      if (more) issue(of, product);
    }
  }

  // Takes one step with any scales, wild ones too; reads their codes from global memory.
  __device__ __forceinline__ void wild_step(const Work& work, int step, Product& product,
                                            Product& sums) {
    const int done = stages_.slot(), k = work.k_begin + step;
    finish(product);
    const auto factors = [&](int half, int span) {
      const CodeRow row{0, work.row + Rows::of_thread() + half * 8};
      return wild_factors(code_at(p_.scale_a, row, k),
                          code_at(p_.scale_b, b_code_row<Tile>(p_, work, span), k));
    };
    promote_wild<Tile::kSpans>(factors, product, sums);
    stages_.release(done);
    stages_.advance();
  }

  const GemmParams& p_;
  GemmShared<Tile>& shared_;
  WorkRing<Tile> ring_;
  StepFactors<Tile> factors_;
  Stages<Tile> stages_;
};

}  // namespace moxie::sm90
