// Tiles of rows: what a CTA works on. How many tiles a group has is only known on the device; the
// host knows bounds. group_search.cuh finds a tile.
#pragma once

#include "moxie/core/layout/group_walk.h"
#include "moxie/core/layout/shape.h"

namespace moxie::cuda {

// The tallest block, and one tile of swizzled scales: no block and no scale tile is shared by CTAs.
inline constexpr int kTileRows = 128;
static_assert(kTileRows == kScaleTileRows);

struct RowTile {
  Panel panel;
  int64_t row;  // first row of the tile, counted from the panel's first
  // Past the last group: panel.begin and panel.padded are where the rows that no group covers and
  // the unused end of a padded buffer begin, row is counted from there.
  bool tail;
};

constexpr int64_t tiles_of(int64_t rows, int64_t alignment) {
  return ceil_div<int64_t>(align_up(rows, alignment), kTileRows);
}

// How many tiles cover every panel, padded to the alignment, and what no panel covers of a buffer
// of `buffer_rows` rows. With offs an upper bound: G groups and the tail can each waste a tile less
// one row; at least one tile is left for the tail. It holds for the rows of x and for those
// padded_rows() makes of them alike, as the padding of a group is inside its last tile, and
// kLineTiles and one are for the last line; so for those, pass the rows of x. Cut in the buffer, a
// group's first tile may be cut once more, and its padding, less than a quarter of a tile, counts.
constexpr int64_t num_row_tiles(const Panels& panels, int64_t alignment, int64_t buffer_rows,
                                Cut cut = Cut::kAtPanels) {
  constexpr int64_t kLineTiles = kMemoryLine / kTileRows;
  const int64_t cuts = cut == Cut::kInBuffer ? panels.count / 4 + 1 : 0;
  if (panels.offs) return buffer_rows / kTileRows + panels.count + 2 + kLineTiles + cuts;
  return panels.count * tiles_of(panels.rows, alignment);
}

// Expected tiles that hold rows of a group, if no group is empty: a group wastes half a tile on
// average. Cut in the buffer, the padding of a group is half a block, and a group that does not
// begin with a tile has a part of two.
constexpr int64_t likely_row_tiles(const Panels& panels, int64_t alignment,
                                   Cut cut = Cut::kAtPanels) {
  if (!panels.offs) return panels.count * tiles_of(panels.rows, alignment);
  const int64_t more = cut == Cut::kInBuffer ? 2 * kTileRows - alignment : kTileRows;
  return (panels.rows + panels.count * more / 2) / kTileRows;
}

// Without offs: one panel, or weights.
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
