// Row tiles: the rows that a CTA works on. The number of tiles of a group is known only on the
// device; the host has an upper bound. group_search.cuh finds a tile.
#pragma once

#include "moxie/core/layout/group_walk.h"
#include "moxie/core/layout/shape.h"

namespace moxie::cuda {

// The height of the tallest block and of a tile of swizzled scales, so that CTAs share neither.
inline constexpr int kTileRows = 128;
static_assert(kTileRows == kScaleTileRows);

struct RowTile {
  Panel panel;
  int64_t row;  // first row of the tile, relative to the panel
  // The tile is past the last group. `row` then counts from panel.begin (the first row that no
  // group covers) or panel.padded (the unused end of a padded buffer).
  bool tail;
};

constexpr int64_t tiles_of(int64_t rows, int64_t alignment) {
  return ceil_div<int64_t>(align_up(rows, alignment), kTileRows);
}

// The number of tiles that cover all panels and the tail of a buffer of `buffer_rows` rows; an
// upper bound if there are offs: R/128 full tiles, a partial tile per group, 2 for the tail (so
// that it has at least one), and kLineTiles because padded_rows() rounds up to 256. It holds for
// the rows of x and for those of its padded buffer, because padding is inside a group's last tile;
// pass the rows of x in both cases. With Cut::kInBuffer, padding (less than 1/4 tile per group)
// adds tiles too.
constexpr int64_t num_row_tiles(const Panels& panels, int64_t alignment, int64_t buffer_rows,
                                Cut cut = Cut::kAtPanels) {
  constexpr int64_t kLineTiles = kMemoryLine / kTileRows;
  const int64_t cuts = cut == Cut::kInBuffer ? panels.count / 4 + 1 : 0;
  if (panels.offs) return buffer_rows / kTileRows + panels.count + 2 + kLineTiles + cuts;
  return panels.count * tiles_of(panels.rows, alignment);
}

// Expected number of non-empty tiles, if no group is empty: a group wastes half a tile on average.
// With Cut::kInBuffer it wastes up to a whole tile, at both ends, less half a block of padding.
constexpr int64_t likely_row_tiles(const Panels& panels, int64_t alignment,
                                   Cut cut = Cut::kAtPanels) {
  if (!panels.offs) return panels.count * tiles_of(panels.rows, alignment);
  const int64_t more = cut == Cut::kInBuffer ? 2 * kTileRows - alignment : kTileRows;
  return (panels.rows + panels.count * more / 2) / kTileRows;
}

// Row tile number `tile` without offs: one panel, or weights.
constexpr RowTile row_tile_of_equal_panels(const Panels& panels, int64_t alignment, int64_t tile) {
  const int64_t per_panel = tiles_of(panels.rows, alignment);
  const int64_t index = tile / per_panel;
  return {.panel = {.index = index,
                    .begin = index * panels.rows,
                    .rows = panels.rows,
                    .padded = index * align_up(panels.rows, alignment),
                    .tiled = index * round_up<int64_t>(panels.rows, kTileRows)},
          .row = tile % per_panel * kTileRows,
          .tail = false};
}

}  // namespace moxie::cuda
