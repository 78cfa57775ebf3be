// The three layouts of scales (NUMERICS.md, section 5):
//   plain     row-major.
//   swizzled  as block-scaled tensor cores read them: tiles of 128 rows x 4 columns (512 bytes) in
//             row-major order; inside a tile, the four bands of 32 rows are side by side.
//   quads     as the Hopper GEMM reads them: the scales of four adjacent blocks along k of one row,
//             then those of the next row.
#pragma once

#include <cstdint>

#include "moxie/core/base/math.h"

namespace moxie {

enum class ScaleLayout : uint8_t {
  kPlain,     // [outer / block, k / block]
  kSwizzled,  // one scale per 1 x 32 (larger blocks repeat theirs), tiled, padded with zeros
  kQuads,     // [k / block / 4 * outer / block, 4], padded with zeros; blocks of 128 along k
};

constexpr const char* name(ScaleLayout layout) {
  switch (layout) {
    case ScaleLayout::kPlain: return "plain";
    case ScaleLayout::kSwizzled: return "swizzled";
    case ScaleLayout::kQuads: break;
  }
  return "quads";
}

inline constexpr int64_t kScaleTileRows = 128;
inline constexpr int64_t kScaleTileCols = 4;
inline constexpr int64_t kScaleTileBytes = kScaleTileRows * kScaleTileCols;

// Index of scale (row, col) in a swizzled matrix that is tiles_per_row tiles wide.
constexpr int64_t swizzled_index(int64_t row, int64_t col, int64_t tiles_per_row) {
  const int64_t tile = row / kScaleTileRows * tiles_per_row + col / kScaleTileCols;
  return tile * kScaleTileBytes + row % 32 * 16 + row % kScaleTileRows / 32 * 4 +
         col % kScaleTileCols;
}

inline constexpr int kQuad = 4;         // adjacent scales along k
inline constexpr int kQuadBlock = 128;  // elements along k per scale

// Index of scale (row, col) in quads; row_bytes = kQuad * rows of the matrix.
constexpr int64_t quad_index(int64_t row, int64_t col, int64_t row_bytes) {
  return col / kQuad * row_bytes + row * kQuad + col % kQuad;
}

}  // namespace moxie
