// The shape of a tile (128 x 128) and of the fragment that each thread holds (8 x 8).
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

// The part of a tile that is inside the panel.
struct TileSpan {
  int64_t row, col;  // first element, relative to the panel
  int rows, cols;    // at most 128 each
};

constexpr int clip(int64_t left, int limit) {
  return static_cast<int>(max<int64_t>(min<int64_t>(left, limit), 0));
}

// Whether rows of `stride` elements can be accessed `count` elements at a time. If so, no such
// piece crosses the end of a row.
template <class T>
bool are_rows_aligned(const T* data, int64_t stride, int count) {
  return reinterpret_cast<uintptr_t>(data) % (count * sizeof(T)) == 0 && stride % count == 0;
}
// Whether an optional result can be accessed `count` elements at a time; true if it is absent.
template <class Out>
bool are_rows_aligned(const std::optional<Out>& out, int count) {
  return !out || are_rows_aligned(out->qdata.data, out->qdata.dim(-1), count);
}

}  // namespace moxie::cuda
