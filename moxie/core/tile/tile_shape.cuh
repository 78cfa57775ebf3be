// The shape of a tile, 128 x 128, and of what each thread of a CTA holds of it, 8 x 8.
#pragma once

#include "moxie/core/base/cuda.cuh"
#include "moxie/core/layout/row_tiles.h"

namespace moxie::cuda {

inline constexpr int kTileCols = 128;
inline constexpr int kPatch = 8;
inline constexpr int kPatchLanes = kTileCols / kPatch;  // along a row
inline constexpr int kWarpRows = kTileRows / kWarps;
static_assert(kWarpRows == 2 * kPatch && kPatchLanes == kWarp / 2);

__device__ inline int patch_row() {
  return static_cast<int>(threadIdx.x / unsigned{kPatchLanes}) * kPatch;
}
__device__ inline int patch_col() {
  return static_cast<int>(threadIdx.x % unsigned{kPatchLanes}) * kPatch;
}

// Elements of a tile that are inside the panel, and where its first one is.
struct TileSpan {
  int64_t row, col;  // counted from the panel's first
  int rows, cols;    // at most 128 each
};

constexpr int clip(int64_t left, int limit) {
  return static_cast<int>(max<int64_t>(min<int64_t>(left, limit), 0));
}

// Can rows of `stride` elements be moved `count` at a time? Then no such piece is cut by an edge.
template <class T>
bool is_aligned(const T* data, int64_t stride, int count) {
  return reinterpret_cast<uintptr_t>(data) % (count * sizeof(T)) == 0 && stride % count == 0;
}

}  // namespace moxie::cuda
