// Assigns tiles to CTAs: the tiles of a launch are cut into runs, one per CTA.
#pragma once

#include "moxie/core/base/cuda.cuh"
#include "moxie/core/layout/group_walk.h"
#include "moxie/core/tile/tile_shape.cuh"

namespace moxie::cuda {

// Order of runs and tiles. A run is a sequence of tiles in the same rows: long runs amortise the
// search for those rows, short runs balance the SMs. The tiles of a run are `step` columns apart,
// so that neighbouring tiles are read and written at the same time, by CTAs that started together.
struct Raster {
  int64_t step, row_tiles;  // columns between tiles of a run; number of rows of tiles
  uint32_t runs;            // per row of tiles
  bool rows_first;          // CTAs go down the rows first: colwise output is contiguous along rows

  int64_t work() const { return row_tiles * runs; }
};

// Whether runs should be twice as long. Up to one tile per group is empty, and a CTA learns that
// only by searching. With many groups (more than 1/8 of the rows of tiles) longer runs pay if other
// CTAs do not hide the search: with at most two CTAs per SM, or if the search is long because there
// are more groups than threads.
inline bool want_long_runs(const Panels& panels, int64_t row_tiles, int ctas_per_sm) {
  return panels.offs && panels.count * 8 > row_tiles &&
         (ctas_per_sm <= 2 || panels.count > kThreads);
}

struct RunLimits {
  int64_t longest;  // in tiles
  int ctas_per_sm;
};

// The longest run that leaves enough CTAs to balance the SMs.
inline int64_t run_length(const Panels& panels, int64_t row_tiles, int64_t col_tiles,
                          const RunLimits& limits) {
  // `enough` CTAs are 15 to 20 waves on 132 SMs with 2 or 3 CTAs each, so that a partial last wave
  // costs little. Sources that allow runs of more than 2 tiles are those with 2 CTAs.
  int64_t longest = limits.longest, enough = longest > 2 ? 4096 : 8192;
  if (want_long_runs(panels, row_tiles, limits.ctas_per_sm)) {
    longest *= 2;
    enough /= 2;
  }
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

// The run of this CTA. If it has none, `tile` is past the last row of tiles. A run has at least
// 2^14 elements, so 32-bit indices suffice.
__device__ inline RasterAt raster_at(const Raster& raster) {
  const auto work = static_cast<uint32_t>(work_index());
  const auto row_tiles = static_cast<uint32_t>(raster.row_tiles);
  if (!raster.rows_first) return {work / raster.runs, work % raster.runs};
  const uint32_t run = work / row_tiles;
  return {run < raster.runs ? work % row_tiles : row_tiles, run};
}

// Tail balancing: in the last few rows of tiles each tile has a CTA of its own, so that all SMs
// finish together. `likely` is an estimate of the non-empty rows of tiles (the exact number is
// known only on the device); `ctas` is the least number of such CTAs.
struct Ending {
  uint32_t first_row, rows;  // the rows of tiles with one CTA per tile

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
  uint32_t tile, run;  // the row of tiles, and the run in it
  uint32_t runs;       // number of runs in this row of tiles
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
