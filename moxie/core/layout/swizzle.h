// Plain scales are row-major. Swizzled scales are in the order in which block-scaled tensor cores
// read them: tiles of 128 rows x 4 columns, 512 bytes each, row-major among themselves; inside a
// tile the 128 rows are four bands of 32 that lie side by side. NUMERICS.md, section 5.
#pragma once

#include <cstdint>

#include "moxie/core/base/math.h"

namespace moxie {

enum class ScaleLayout : uint8_t {
  kPlain,     // [outer / block, k / block]
  kSwizzled,  // one scale per 1 x 32 (those of larger blocks repeated), tiled, padded with zeros
};

constexpr const char* name(ScaleLayout layout) {
  return layout == ScaleLayout::kPlain ? "plain" : "swizzled";
}

inline constexpr int64_t kScaleTileRows = 128;
inline constexpr int64_t kScaleTileCols = 4;
inline constexpr int64_t kScaleTileBytes = kScaleTileRows * kScaleTileCols;

// Byte of scale (row, col) in a swizzled matrix that is tiles_per_row tiles wide.
constexpr int64_t swizzled_index(int64_t row, int64_t col, int64_t tiles_per_row) {
  const int64_t tile = row / kScaleTileRows * tiles_per_row + col / kScaleTileCols;
  return tile * kScaleTileBytes + row % 32 * 16 + row % kScaleTileRows / 32 * 4 +
         col % kScaleTileCols;
}

}  // namespace moxie
