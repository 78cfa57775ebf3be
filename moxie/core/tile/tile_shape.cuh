// The shape of a tile, 128 x 128, and of what each thread of a CTA holds of it, 8 x 8.
#pragma once

#include <optional>

#include "moxie/core/base/cuda.cuh"
#include "moxie/core/layout/row_tiles.h"

namespace moxie::cuda {

inline constexpr int kTileCols = 128;
inline constexpr int kFragment = 8;
inline constexpr int kFragmentLanes = kTileCols / kFragment;  // along a row
inline constexpr int kWarpRows = kTileRows / kWarps;
static_assert(kWarpRows == 2 * kFragment && kFragmentLanes == kWarp / 2);

__device__ inline int fragment_row() {
  return static_cast<int>(threadIdx.x / unsigned{kFragmentLanes}) * kFragment;
}
__device__ inline int fragment_col() {
  return static_cast<int>(threadIdx.x % unsigned{kFragmentLanes}) * kFragment;
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
bool are_rows_aligned(const T* data, int64_t stride, int count) {
  return reinterpret_cast<uintptr_t>(data) % (count * sizeof(T)) == 0 && stride % count == 0;
}
// The same of a result, if it is asked for.
template <class Out>
bool are_rows_aligned(const std::optional<Out>& out, int count) {
  return !out || are_rows_aligned(out->qdata.data, out->qdata.dim(-1), count);
}

}  // namespace moxie::cuda
