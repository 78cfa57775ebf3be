// Which tiles a CTA takes: how the tiles of a launch are cut into runs, one per CTA, and in which
// order.
#pragma once

#include "moxie/core/base/cuda.cuh"
#include "moxie/core/layout/group_walk.h"
#include "moxie/core/tile/tile_shape.cuh"

namespace moxie::cuda {

// The CTAs of a launch, in the order in which they start. Each takes a run of tiles from the same
// rows: long runs make the search for those rows cheap, short ones keep every SM busy to the end.
// The tiles of a run are `step` columns apart, so that what lies side by side is read and written
// at the same time, by CTAs that started together. For the colwise form those are the CTAs of all
// rows of the same columns.
struct Raster {
  int64_t step, row_tiles;
  uint32_t runs;
  bool rows_first;

  int64_t work() const { return row_tiles * runs; }
};

// Up to a tile per group is there for nothing, and takes a search to find that out. With many
// groups runs twice as long pay, even where they leave few CTAs, if other CTAs do not hide a
// search: with two of them per SM, or where it is a long one, of more groups than a CTA has
// threads.
inline bool want_long_runs(const Panels& panels, int64_t row_tiles, int ctas_per_sm) {
  return panels.offs && panels.count * 8 > row_tiles &&
         (ctas_per_sm <= 2 || panels.count > kThreads);
}

struct RunLimits {
  int64_t longest;  // in tiles
  int ctas_per_sm;
};

// As long as leaves enough CTAs to keep every SM busy to the end.
inline int64_t run_length(const Panels& panels, int64_t row_tiles, int64_t col_tiles,
                          const RunLimits& limits) {
  int64_t longest = limits.longest, enough = longest > 2 ? 4096 : 8192;  // CTAs of a launch
  if (want_long_runs(panels, row_tiles, limits.ctas_per_sm)) longest *= 2, enough /= 2;
  return max<int64_t>(min<int64_t>(row_tiles * col_tiles / enough, longest), 1);
}

inline Raster make_raster(const Panels& panels, int64_t cols, int64_t row_tiles, bool rows_first,
                          const RunLimits& limits) {
  const int64_t col_tiles = ceil_div<int64_t>(cols, kTileCols);
  const int64_t runs = ceil_div(col_tiles, run_length(panels, row_tiles, col_tiles, limits));
  return {.step = runs * kTileCols,
          .row_tiles = row_tiles,
          .runs = static_cast<uint32_t>(runs),
          .rows_first = rows_first};
}

struct RasterAt {
  uint32_t tile, run;
};

// tile is past the last for a CTA without work. A run is 2^14 elements or more, so 32 bits are
// enough to number them.
__device__ inline RasterAt raster_at(const Raster& raster) {
  const auto work = static_cast<uint32_t>(work_index());
  const auto row_tiles = static_cast<uint32_t>(raster.row_tiles);
  if (!raster.rows_first) return {work / raster.runs, work % raster.runs};
  const uint32_t run = work / row_tiles;
  return {run < raster.runs ? work % row_tiles : row_tiles, run};
}

// CTAs that end together: in a few rows of tiles every tile has one of its own, `ctas` of them or
// some more. These should be the last rows that are somebody's, of which there is an estimate.
struct Ending {
  uint32_t first_row, rows;  // of tiles

  static Ending of(int64_t row_tiles, int64_t likely, int64_t col_tiles, int64_t ctas) {
    const int64_t rows = min(ceil_div(ctas, max<int64_t>(col_tiles, 1)), row_tiles);
    const int64_t first = max<int64_t>(min(likely, row_tiles) - rows, 0);
    return {.first_row = static_cast<uint32_t>(first), .rows = static_cast<uint32_t>(rows)};
  }
  int64_t work(int64_t row_tiles, int64_t runs, int64_t col_tiles) const {
    return (row_tiles - rows) * runs + rows * col_tiles;
  }
};

struct EndingAt {
  uint32_t tile, run, runs;  // of so many in this row of tiles
};

__device__ inline EndingAt ending_at(const Ending& ending, uint32_t work, uint32_t runs,
                                     uint32_t col_tiles) {
  const uint32_t before = ending.first_row * runs, behind = before + ending.rows * col_tiles;
  const bool ends = work >= before && work < behind;
  const uint32_t count = ends ? col_tiles : runs;
  const uint32_t index = work < before ? work : ends ? work - before : work - behind;
  const uint32_t first = work < before ? 0 : ending.first_row + (ends ? 0 : ending.rows);
  return {.tile = first + index / count, .run = index % count, .runs = count};
}

}  // namespace moxie::cuda
