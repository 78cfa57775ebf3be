// Which rows a CTA works on. Rows are cut into tiles that never hold two panels; how many tiles a
// group has is only known on the device, and each CTA finds its own with a scan over offs.
#pragma once

#include "moxie/core/base/cuda.cuh"
#include "moxie/core/layout/check.h"
#include "moxie/core/layout/panel.h"

namespace moxie::cuda {

// The tallest block, and one tile of swizzled scales: no block and no scale tile is shared by CTAs.
inline constexpr int kTileRows = 128;
static_assert(kTileRows == kScaleTileRows);

enum class Cut {
  kAtPanels,  // from a panel's first row on
  // At multiples of kTileRows of a colwise buffer, so that a column of a tile is one piece of 128
  // bytes of memory and not two. A panel's first tile may begin before it.
  kInBuffer,
};

struct RowTile {
  Panel panel;
  int64_t row;  // first row of the tile, counted from the panel's first
  // Past the last group: panel.begin and panel.padded are where the rows that no group covers and
  // the unused end of a padded buffer begin, row is counted from there.
  bool tail;
};

struct TileCounts {
  uint32_t padded, tiles;  // rows with padding, and tiles
};

struct RowTileSearch {  // in shared memory: what warps tell each other, and the result
  int64_t end[kWarps];
  union {
    int64_t sum[2][kWarps];
    TileCounts count[2][kWarps];
  };
  RowTile found;
};

// round_up() without its division where it can be: a CTA that looks for its rows waits for it.
constexpr int64_t align_up(int64_t rows, int64_t alignment) {
  if (alignment & (alignment - 1)) return round_up(rows, alignment);
  return (rows + alignment - 1) & -alignment;
}

constexpr int64_t tiles_of(int64_t rows, int64_t alignment) {
  return ceil_div<int64_t>(align_up(rows, alignment), kTileRows);
}

// next_panel(), with align_up().
constexpr Panel panel_after(const Panels& panels, const Panel& before, int64_t alignment) {
  Panel panel = next_panel(panels, before, 1);
  panel.padded = before.padded + align_up(before.rows, alignment);
  return panel;
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

// How many of those are somebody's, if no group is empty and they end anywhere: half a tile of each
// is for nothing; cut in the buffer, padding is half a block, and where a group does not begin with
// a tile one has a part of two.
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

// Combines the values of all threads before this one; 0 is neutral. One barrier.
template <class Combine>
__device__ int64_t scan_before(int64_t mine, int64_t (&warp_total)[kWarps], Combine combine) {
  const int lane = lane_index(), warp = warp_index();
  int64_t upto = mine;
  for (int step = 1; step < kWarp; step *= 2) {
    const int64_t other = __shfl_up_sync(~0u, upto, step);
    if (lane >= step) upto = combine(upto, other);
  }
  if (lane == kWarp - 1) warp_total[warp] = upto;
  __syncthreads();
  int64_t before = __shfl_up_sync(~0u, upto, 1);
  if (lane == 0) before = 0;
  for (int w = 0; w < warp; ++w) before = combine(before, warp_total[w]);
  return before;
}

// Calls f(panel, tiles before it) for the groups of this thread, then returns the panel that
// follows them (without rows) and the tiles before it in `tiles`. All threads must call it.
template <class F>
__device__ Panel for_my_groups(const Panels& panels, int64_t alignment, RowTileSearch& search,
                               int64_t& tiles, F&& f) {
  const int64_t share = ceil_div<int64_t>(panels.count, kThreads);
  const int64_t first = min<int64_t>(threadIdx.x * share, panels.count);
  const int64_t last = min<int64_t>(first + share, panels.count);

  // Where the groups before mine end: the largest of their ends, as next_panel() has it.
  int64_t end = 0;
  for (int64_t g = first; g < last; ++g)
    end = max<int64_t>(end, min<int64_t>(panels.offs[g], panels.rows));
  const int64_t begin =
      scan_before(end, search.end, [](int64_t a, int64_t b) { return max(a, b); });

  const auto add = [](int64_t a, int64_t b) { return a + b; };
  const auto walk = [&](Panel panel, int64_t& count, auto&& visit) {
    for (int64_t g = first; g < last; ++g) {
      panel = panel_after(panels, panel, alignment);
      visit(panel, count);
      count += tiles_of(panel.rows, alignment);
    }
    return Panel{.index = last,
                 .begin = panel.begin + panel.rows,
                 .rows = 0,
                 .padded = panel.padded + align_up(panel.rows, alignment),
                 .tiled = panel.tiled + round_up<int64_t>(panel.rows, kTileRows)};
  };
  int64_t mine = 0;
  Panel before{.index = first - 1, .begin = begin, .rows = 0, .padded = 0, .tiled = 0};
  const int64_t padded = walk(before, mine, [](const Panel&, int64_t) {}).padded;
  tiles = scan_before(mine, search.sum[0], add);
  before.padded = scan_before(padded, search.sum[1], add);
  before.tiled = tiles * kTileRows;  // only where the alignment divides kTileRows, and used only so
  return walk(before, tiles, f);
}

// The same search by one warp, without barriers: it is what every CTA of a kernel waits for. 32
// bits are enough, as offs have no more: rows in a group are below 2^31, and its tiles far fewer. A
// lane takes neighbouring groups.
struct LaneGroups {
  int32_t first, last;     // groups
  int32_t first_offs;      // of the first; of up to 32, all there is, so that memory is asked once
  uint32_t begin;          // row where they begin
  uint32_t tiles, padded;  // before them
  uint32_t scale_tiles;    // of swizzled scales, which are cut at panels
  uint32_t own_tiles;
};

__device__ inline uint32_t align_up32(uint32_t rows, uint32_t alignment) {
  if (alignment & (alignment - 1)) return (rows + alignment - 1) / alignment * alignment;
  return (rows + alignment - 1) & -alignment;
}

// Rows of a group that begins at `begin`, which becomes its end.
__device__ inline uint32_t take_group(const Panels& panels, const LaneGroups& lane, int32_t group,
                                      uint32_t& begin) {
  const int32_t offs = group == lane.first ? lane.first_offs : panels.offs[group];
  const auto end = static_cast<uint32_t>(max<int64_t>(min<int64_t>(offs, panels.rows), begin));
  const uint32_t rows = end - begin;
  begin = end;
  return rows;
}

// Tiles of a group with so many rows, padding included, that begins behind `padded` others.
template <Cut kCut>
__device__ uint32_t tiles_of_group(uint32_t padded, uint32_t rows) {
  const uint32_t before = kCut == Cut::kInBuffer && rows > 0 ? padded % kTileRows : 0;
  return (before + rows + kTileRows - 1) / kTileRows;
}

// The sum of what the lanes before this one have.
__device__ inline uint32_t sum_before(uint32_t mine) {
  uint32_t sum = mine;
#pragma unroll
  for (int step = 1; step < kWarp; step *= 2) {
    const uint32_t other = __shfl_up_sync(~0u, sum, step);
    if (lane_index() >= step) sum += other;
  }
  return sum - mine;
}

template <Cut kCut>
__device__ LaneGroups groups_of_lane(const Panels& panels, uint32_t alignment) {
  const int lane = lane_index();
  const auto count = static_cast<int32_t>(panels.count), share = (count + kWarp - 1) / kWarp;
  LaneGroups mine{.first = min(lane * share, count), .last = min((lane + 1) * share, count)};
  if (mine.first < mine.last) mine.first_offs = panels.offs[mine.first];
  uint32_t end = 0;
  for (int32_t g = mine.first; g < mine.last; ++g) take_group(panels, mine, g, end);
#pragma unroll
  for (int step = 1; step < kWarp; step *= 2) {
    const uint32_t other = __shfl_up_sync(~0u, end, step);
    if (lane >= step) end = max(end, other);
  }
  mine.begin = __shfl_up_sync(~0u, end, 1);
  if (lane == 0) mine.begin = 0;

  const auto for_each = [&](auto&& f) {  // f(rows of a group, with padding)
    uint32_t begin = mine.begin;
    for (int32_t g = mine.first; g < mine.last; ++g)
      f(align_up32(take_group(panels, mine, g, begin), alignment));
  };
  uint32_t padded = 0;
  for_each([&](uint32_t rows) {
    mine.own_tiles += tiles_of_group<Cut::kAtPanels>(0, rows);
    padded += rows;
  });
  mine.padded = sum_before(padded);
  mine.tiles = mine.scale_tiles = sum_before(mine.own_tiles);
  if (kCut == Cut::kInBuffer) {  // they depend on where a group begins
    padded = mine.padded, mine.own_tiles = 0;
    for_each([&](uint32_t rows) {
      mine.own_tiles += tiles_of_group<kCut>(padded, rows);
      padded += rows;
    });
    mine.tiles = sum_before(mine.own_tiles);
  }
  return mine;
}

// A walk over groups to a tile: what is before the next of them.
template <Cut kCut>
struct GroupWalk {
  uint32_t begin;  // row
  uint32_t tiles, padded, scale_tiles;

  // Stores the tile-th tile of rows if it is one of this group's; else goes on behind it.
  __device__ bool find(int32_t group, uint32_t rows, uint32_t aligned, uint32_t tile,
                       RowTile& found) {
    const uint32_t own = tiles_of_group<kCut>(padded, aligned);
    if (tile - tiles < own) {
      const uint32_t before = kCut == Cut::kInBuffer ? padded % kTileRows : 0;
      found = {.panel = panel(group, rows),
               .row = int64_t{tile - tiles} * kTileRows - before,
               .tail = false};
      return true;
    }
    begin += rows, tiles += own, padded += aligned;
    scale_tiles += tiles_of_group<Cut::kAtPanels>(0, aligned);
    return false;
  }
  // Behind all groups: the tile is no group's.
  __device__ void find_tail(const Panels& panels, uint32_t tile, RowTile& found) const {
    found = {.panel = panel(static_cast<int32_t>(panels.count), 0),
             .row = int64_t{tile - tiles} * kTileRows,
             .tail = true};
  }

 private:
  __device__ Panel panel(int32_t index, uint32_t rows) const {
    // tiled: only where the alignment divides kTileRows, and used only so.
    return {.index = index,
            .begin = begin,
            .rows = rows,
            .padded = padded,
            .tiled = int64_t{scale_tiles} * kTileRows};
  }
};

// Stores the tile-th tile of rows, if it is one of this lane's; the last lane, if it is no group's.
template <Cut kCut>
__device__ void find_in_lane(const Panels& panels, uint32_t alignment, uint32_t tile,
                             const LaneGroups& mine, RowTile& found) {
  const bool last = lane_index() == kWarp - 1;
  if (tile < mine.tiles || (tile >= mine.tiles + mine.own_tiles && !last)) return;
  GroupWalk<kCut> walk{.begin = mine.begin,
                       .tiles = mine.tiles,
                       .padded = mine.padded,
                       .scale_tiles = mine.scale_tiles};
  for (int32_t g = mine.first; g < mine.last; ++g) {
    uint32_t end = walk.begin;
    const uint32_t rows = take_group(panels, mine, g, end);
    if (walk.find(g, rows, align_up32(rows, alignment), tile, found)) return;
  }
  walk.find_tail(panels, tile, found);
}

// The sums of what the threads before this one have. One barrier.
__device__ inline TileCounts counts_before(const TileCounts& mine, TileCounts (&of_warp)[kWarps]) {
  TileCounts before{sum_before(mine.padded), sum_before(mine.tiles)};
  if (lane_index() == kWarp - 1)
    of_warp[warp_index()] = {before.padded + mine.padded, before.tiles + mine.tiles};
  __syncthreads();
#pragma unroll
  for (int w = 0; w < kWarps - 1; ++w)
    if (w < warp_index()) before.padded += of_warp[w].padded, before.tiles += of_warp[w].tiles;
  return before;
}

// The same search by all threads, kMine groups each: a lane of one warp would walk over more. False
// where ends decrease; then nothing is found.
template <Cut kCut, int kMine>
__device__ bool find_by_all(const Panels& panels, uint32_t alignment, uint32_t tile,
                            RowTileSearch& search) {
  const int first = static_cast<int>(threadIdx.x) * kMine,
            last = static_cast<int>(panels.count) - 1;
  const auto end_of = [&](int group) {  // behind the last, groups without rows
    const int32_t offs = panels.offs[min(group, last)];
    return static_cast<uint32_t>(max<int64_t>(min<int64_t>(offs, panels.rows), 0));
  };
  uint32_t end[kMine + 1] = {first == 0 ? 0 : end_of(first - 1)};  // of the group before mine, too
#pragma unroll
  for (int i = 0; i < kMine; ++i) end[i + 1] = end_of(first + i);
  bool rise = true;
#pragma unroll
  for (int i = 0; i < kMine; ++i) rise &= end[i] <= end[i + 1];
  if (!__syncthreads_and(rise)) return false;

  const auto aligned = [&](int i) { return align_up32(end[i + 1] - end[i], alignment); };
  TileCounts own{};
#pragma unroll
  for (int i = 0; i < kMine; ++i)
    own.padded += aligned(i), own.tiles += tiles_of_group<Cut::kAtPanels>(0, aligned(i));
  const TileCounts before = counts_before(own, search.count[0]);
  GroupWalk<kCut> walk{
      .begin = end[0], .tiles = before.tiles, .padded = before.padded, .scale_tiles = before.tiles};
  if constexpr (kCut == Cut::kInBuffer) {  // tiles depend on where a group begins
    own = {.padded = before.padded, .tiles = 0};
#pragma unroll
    for (int i = 0; i < kMine; ++i)
      own.tiles += tiles_of_group<kCut>(own.padded, aligned(i)), own.padded += aligned(i);
    walk.tiles = counts_before(own, search.count[1]).tiles;
  }
#pragma unroll
  for (int i = 0; i < kMine; ++i)
    if (walk.find(first + i, end[i + 1] - end[i], aligned(i), tile, search.found)) return true;
  if (threadIdx.x == kThreads - 1 && tile >= walk.tiles) walk.find_tail(panels, tile, search.found);
  return true;
}

template <Cut kCut>
__device__ bool find_by_all(const Panels& panels, uint32_t alignment, uint32_t tile,
                            RowTileSearch& search) {
  constexpr int kMost = kMaxGroups / kThreads;
  static_assert(kMaxGroups % kThreads == 0);
  if (blockDim.x != kThreads || panels.count <= kWarp) return false;
  return panels.count <= kThreads ? find_by_all<kCut, 1>(panels, alignment, tile, search)
                                  : find_by_all<kCut, kMost>(panels, alignment, tile, search);
}

// The tile-th tile of rows, for all threads of the CTA, which must all call it. It is in shared
// memory, so that it costs no registers, until the call after the next barrier.
template <Cut kCut = Cut::kAtPanels>
__device__ const RowTile& find_row_tile(const Panels& panels, int64_t alignment, int64_t tile,
                                        RowTileSearch& search) {
  if (!panels.offs) {
    if (threadIdx.x == 0) search.found = row_tile_of_equal_panels(panels, alignment, tile);
  } else {
    const auto step = static_cast<uint32_t>(alignment), index = static_cast<uint32_t>(tile);
    if (!find_by_all<kCut>(panels, step, index, search) && warp_index() == 0)
      find_in_lane<kCut>(panels, step, index, groups_of_lane<kCut>(panels, step), search.found);
  }
  __syncthreads();
  return search.found;
}

}  // namespace moxie::cuda
