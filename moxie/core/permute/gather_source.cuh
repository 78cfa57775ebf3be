// A source for the quantizer (tile/source.cuh) that gathers permuted rows.
#pragma once

#include "moxie/core/tile/source.cuh"

namespace moxie::cuda {

// Clamps an index from the caller, which may be out of range.
__device__ inline int64_t in_range(int32_t index, int64_t end) {
  return min<int64_t>(max<int64_t>(index, 0), end - 1);
}

// Loads rows of bf16 or f32 in the permuted order: row r is x[slot_of[r] / top_k].
template <class T, bool kIsAligned>
struct GatherSource : OneTile {
  using Element = T;
  static constexpr bool kAligned = kIsAligned;
  static constexpr bool kStaged = kAligned && sizeof(T) == 2;
  static constexpr int kCtas = sizeof(T) == 2 ? 3 : 2;
  static constexpr int64_t kLongestRun = 2;
  struct Shared {
    alignas(16) int32_t token[kTileRows];
  };
  const T* x;
  const int32_t* slot_of;
  int64_t top_k, slots, cols;
  const Shared* shared;

  __device__ GatherSource at_rows(const Panels&, const RowTile& at, Shared& own) const {
    if (const int row = threadIdx.x; row < kTileRows) {
      const int64_t r = at.panel.begin + at.row + row;
      const bool inside = at.row + row < at.panel.rows;
      own.token[row] = inside ? static_cast<int32_t>(in_range(slot_of[r], slots) / top_k) : 0;
    }
    __syncthreads();
    GatherSource source = *this;
    source.shared = &own;
    return source;
  }
  __device__ const T* row_at(const TileSpan& span, int i) const {
    return x + shared->token[fragment_row() + i] * cols + span.col + fragment_col();
  }
  __device__ void load(const TileSpan& span, Fragment<T> (&fragments)[kParts]) const {
#pragma unroll
    for (int i = 0; i < kFragment; ++i)
      load_row<kAligned>(row_at(span, i),
                         fragment_row() + i < span.rows ? span.cols - fragment_col() : 0,
                         fragments[0].word[i]);
  }

  using Stage = uint4[kFragment][kThreads];
  __device__ void stage(const TileSpan& span, Stage& stage) const {
#pragma unroll
    for (int i = 0; i < kFragment; ++i)
      stage_piece(stage[i], row_at(span, i),
                  fragment_row() + i < span.rows && fragment_col() < span.cols);
    __pipeline_commit();
  }
  __device__ static void unstage(const TileSpan&, const Stage& stage, const Held&,
                                 Fragment<T> (&fragments)[kParts]) {
    __pipeline_wait_prior(0);
#pragma unroll
    for (int i = 0; i < kFragment; ++i) staged_piece(stage[i], fragments[0].word[i]);
  }
};

}  // namespace moxie::cuda
