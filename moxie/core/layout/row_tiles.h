// A row tile is the rows, at most 128, that one CTA works on. With offs only the device knows how
// many tiles there are: the host launches CTAs for an upper bound, and group_search.cuh finds the
// rows of each.
#pragma once

#include "moxie/core/layout/group_walk.h"
#include "moxie/core/layout/shape.h"

namespace moxie::cuda {

// The height of the tallest block and of a tile of swizzled scales, so that no two CTAs share one.
inline constexpr int kTileRows = 128;
static_assert(kTileRows == kScaleTileRows);

struct RowTile {
  Panel panel;
  int64_t row;  // first row of the tile, relative to the panel
  // Whether the tile is past the last group. `row` then counts from panel.begin in x (the first row
  // that no group covers), or from panel.padded in a padded buffer (its unused end).
  bool tail;
};

constexpr int64_t tiles_of(int64_t rows, int64_t alignment) {
  return ceil_div<int64_t>(align_up(rows, alignment), kTileRows);
}

// The number of tiles that cover all panels and the tail, which is what the groups leave of a
// buffer of `buffer_rows` rows. An upper bound if there are offs: R/128 full tiles, a partial tile
// per group, 2 for the tail (so that it has at least one), and kLineTiles because padded_rows()
// rounds up to 256. If the alignment is at most a tile, padding is inside a group's last tile: pass
// the rows of x even for a padded buffer. With Cut::kInBuffer, padding (less than 1/4 tile per
// group) adds tiles too.
constexpr int64_t num_row_tiles(const Panels& panels, int64_t alignment, int64_t buffer_rows,
                                Cut cut = Cut::kAtPanels) {
  constexpr int64_t kLineTiles = kMemoryLine / kTileRows;
  const int64_t cuts = cut == Cut::kInBuffer ? panels.count / 4 + 1 : 0;
  if (panels.offs) return buffer_rows / kTileRows + panels.count + 2 + kLineTiles + cuts;
  return panels.count * tiles_of(panels.rows, alignment);
}

// Expected number of non-empty tiles, if no group is empty. A group wastes half a tile on average;
// with Cut::kInBuffer it wastes half a tile at each of its two ends, less half a block, which its
// padding fills.
constexpr int64_t likely_row_tiles(const Panels& panels, int64_t alignment,
                                   Cut cut = Cut::kAtPanels) {
  if (!panels.offs) return panels.count * tiles_of(panels.rows, alignment);
  const int64_t more = cut == Cut::kInBuffer ? 2 * kTileRows - alignment : kTileRows;
  return (panels.rows + panels.count * more / 2) / kTileRows;
}

// Row tile number `tile` if there are no offs. All panels then have the same number of rows: tokens
// are one panel, weights are G.
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
