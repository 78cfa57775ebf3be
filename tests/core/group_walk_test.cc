// The two ways from offs to the rows of a group, for any offs: next_panel(), which goes from group
// to group, and the search by the threads of a CTA (group_search.cuh), run on a CPU.
#include "tests/support/cta_on_host.h"
// Must come after cta_on_host.h.
#include <gtest/gtest.h>

#include "moxie/core/tile/group_search.cuh"
#include "tests/support/any_offs.h"

namespace moxie::testing {
namespace {

// Where each group ends for any offs: at the largest end so far, where ends past the last row count
// as the last row. Written differently than group_end(), which is under test.
std::vector<int64_t> ends_of(const std::vector<int32_t>& offs, int64_t rows) {
  std::vector<int64_t> ends;
  int64_t most = 0;
  for (const int64_t end : offs) {
    if (end > rows) most = rows;
    if (end <= rows && end > most) most = end;
    ends.push_back(most);
  }
  return ends;
}

Panels panels_of(const std::vector<int32_t>& offs, int64_t rows) {
  return {.rows = rows,
          .cols = 1,
          .count = static_cast<int64_t>(offs.size()),
          .offs = offs.data(),
          .weights = false};
}

std::vector<Panel> walk(const Panels& panels, int64_t alignment) {
  std::vector<Panel> all;
  Panel panel = first_panel();
  for (int64_t g = 0; g < panels.count; ++g)
    all.push_back(panel = next_panel(panels, panel, alignment));
  return all;
}

bool equal(const Panel& a, const Panel& b) {
  return a.index == b.index && a.begin == b.begin && a.rows == b.rows && a.padded == b.padded &&
         a.tiled == b.tiled;
}

TEST(GroupWalk, EndsAtTheLargestEndSoFarForAnyOffs) {
  const int64_t rows = 5;
  for (const int64_t alignment : {1, 4, 7, 128})
    for (int groups = 1; groups <= 5; ++groups)
      for_each_offs(groups, {kInt32Min, -1, 0, 2, 3, 5, 6, kInt32Max}, [&](const auto& offs) {
        const std::vector<int64_t> ends = ends_of(offs, rows);
        int64_t begin = 0, padded = 0, tiled = 0;
        for (const Panel& panel : walk(panels_of(offs, rows), alignment)) {
          const int64_t count = ends[panel.index] - begin;
          ASSERT_TRUE(equal(panel, {panel.index, begin, count, padded, tiled}));
          begin += count;
          padded += (count + alignment - 1) / alignment * alignment;
          tiled += ((count + alignment - 1) / alignment * alignment + 127) / 128 * 128;
        }
      });
}

// ---- the search of a CTA ----

struct Search {
  Cut cut = Cut::kAtPanels;
  int64_t alignment = 1;
  int64_t buffer_rows = 0;  // rows of the padded colwise buffer, all of which tiles must cover
  int64_t num_tiles = 0;
  int threads = cuda::kThreads;
  LaneOrder order = LaneOrder::kUp;
};

// The search as a quantizer uses it that pads groups to blocks of `alignment` rows in a colwise
// buffer.
Search search_of(const Panels& panels, Cut cut, int64_t alignment) {
  return {.cut = cut,
          .alignment = alignment,
          .buffer_rows = padded_rows(panels.rows, panels.count, alignment),
          .num_tiles = cuda::num_row_tiles(panels, alignment, panels.rows, cut)};
}

// Finds every row tile; all threads must return the same one.
template <Cut kCut>
void find_all(const Panels& panels, const Search& how, std::vector<cuda::RowTile>& tiles) {
  static cuda::RowTileSearch search;
  tiles.assign(how.num_tiles, {});
  bool agree = true;
  CtaOnHost::instance().run(how.threads, how.order, [&] {
    for (int64_t t = 0; t < how.num_tiles; ++t) {
      // Overwrites shared memory, so that a thread that reads it too early finds wrong values.
      if (threadIdx.x == 0) std::memset(static_cast<void*>(&search), 0xa5, sizeof(search));
      __syncthreads();
      const cuda::RowTile& found = cuda::find_row_tile<kCut>(panels, how.alignment, t, search);
      if (threadIdx.x == 0) tiles[t] = found;
      __syncthreads();
      agree = agree && &found == &search.found;
    }
  });
  ASSERT_TRUE(agree);
}

// Every row of x and of the padded buffer must be in exactly one tile, a tile may have rows of one
// group only, and that group must be the one next_panel() gives.
void check_search(const Panels& panels, const Search& how) {
  static std::vector<cuda::RowTile> tiles;
  static std::vector<int> of_x, of_buffer;
  if (how.cut == Cut::kAtPanels)
    find_all<Cut::kAtPanels>(panels, how, tiles);
  else
    find_all<Cut::kInBuffer>(panels, how, tiles);
  const std::vector<Panel> all = walk(panels, how.alignment);
  const Panel& last = all.back();
  of_x.assign(panels.rows, 0), of_buffer.assign(how.buffer_rows, 0);
  const auto cover = [](std::vector<int>& times, int64_t begin, int64_t end) {
    ASSERT_GE(begin, 0);
    for (int64_t i = begin; i < std::min<int64_t>(end, times.size()); ++i) ++times[i];
  };
  for (const cuda::RowTile& tile : tiles) {
    const Panel& panel = tile.panel;
    const int64_t end = tile.row + cuda::kTileRows;
    if (tile.tail) {
      ASSERT_EQ(panel.begin, last.begin + last.rows);
      ASSERT_EQ(panel.padded, last.padded + round_up(last.rows, how.alignment));
      ASSERT_GE(tile.row, 0);
      cover(of_x, panel.begin + tile.row, panel.begin + end);
      cover(of_buffer, panel.padded + tile.row, panel.padded + end);
      continue;
    }
    ASSERT_LT(panel.index, panels.count);
    ASSERT_TRUE(equal(panel, all[panel.index]));
    const int64_t padded = round_up(panel.rows, how.alignment),
                  first = std::max<int64_t>(tile.row, 0);
    ASSERT_LT(first, padded);
    ASSERT_GT(end, 0);
    ASSERT_EQ((how.cut == Cut::kInBuffer ? panel.padded + tile.row : tile.row) % cuda::kTileRows,
              0);
    cover(of_x, panel.begin + first, panel.begin + std::min(end, panel.rows));
    cover(of_buffer, panel.padded + first, panel.padded + std::min(end, padded));
  }
  for (const int times : of_x) ASSERT_EQ(times, 1);
  for (const int times : of_buffer) ASSERT_EQ(times, 1);
}

#if defined(__SANITIZE_ADDRESS__)
constexpr int kMostGroups = 3;
constexpr int kTimes = 1;
#else
constexpr int kMostGroups = 5;
constexpr int kTimes = 2;
#endif

// With up to 32 groups one warp searches. Its lanes run in rising and in falling order, which finds
// missing barriers.
TEST(GroupSearch, CoversEveryRowOnceForAnyOffs) {
  const int64_t rows = 300;
  for (const Cut cut : {Cut::kAtPanels, Cut::kInBuffer})
    for (const int64_t alignment : {32, 128})
      for (int groups = 1; groups <= kMostGroups; ++groups) {
        std::vector<int32_t> values{kInt32Min, 0, 161, 300, kInt32Max};
        if (groups < 5) values.insert(values.end(), {1, 128});
        LaneOrder order = LaneOrder::kUp;
        for_each_offs(groups, values, [&](const auto& offs) {
          if (::testing::Test::HasFatalFailure()) return;
          Search how = search_of(panels_of(offs, rows), cut, alignment);
          how.threads = cuda::kWarp;
          how.order = order = order == LaneOrder::kUp ? LaneOrder::kDown : LaneOrder::kUp;
          ASSERT_NO_FATAL_FAILURE(check_search(panels_of(offs, rows), how))
              << ::testing::PrintToString(offs) << " aligned to " << alignment;
        });
      }
}

TEST(GroupSearch, TakesAnyAlignmentThatGroupsArePaddedTo) {
  Random random(1);
  for (int i = 0; i < 200 * kTimes; ++i) {
    const auto groups = static_cast<int>(random.between(1, 40));
    const auto rows = static_cast<int>(random.between(0, 1000));
    const std::vector<int32_t> offs = random_offs(random, groups, rows, OffsAre::kAnything);
    const Panels panels = panels_of(offs, rows);
    const int64_t alignment = random.pick({1, 3, 16, 100, 128, 200, 256});
    const int64_t buffer_rows = pad_groups_rows<int64_t>(rows, groups, alignment);
    ASSERT_NO_FATAL_FAILURE(
        check_search(panels, {.alignment = alignment,
                              .buffer_rows = buffer_rows,
                              .num_tiles = cuda::num_row_tiles(panels, alignment, buffer_rows)}))
        << ::testing::PrintToString(offs) << " of " << rows << " aligned to " << alignment;
  }
}

// With more than 32 groups all threads search, with one or four groups each; where ends decrease,
// one warp does.
TEST(GroupSearch, CoversEveryRowOnceOfManyGroups) {
  Random random(2);
  for (const int groups : {32, 33, 64, 255, 256, 257, 700, 1023, 1024})
    for (int i = 0; i < (groups < 300 ? kTimes : kTimes / 2); ++i)
      for (const OffsAre are : {OffsAre::kGood, OffsAre::kWrongHereAndThere, OffsAre::kAnything}) {
        // Few rows keep this fast: every tile costs a search, and every group has a tile anyway.
        const std::vector<int32_t> offs = random_offs(random, groups, 700, are);
        const Panels panels = panels_of(offs, 700);
        const Cut cut = random.pick({Cut::kAtPanels, Cut::kInBuffer});
        Search how = search_of(panels, cut, random.pick({32, 128}));
        how.order = random.pick({LaneOrder::kUp, LaneOrder::kDown});
        ASSERT_NO_FATAL_FAILURE(check_search(panels, how)) << ::testing::PrintToString(offs);
      }
}

TEST(GroupSearch, GivesEveryGroupToOneThreadAsTheWalkHasIt) {
  Random random(3);
  static cuda::RowTileSearch search;
  for (const int groups : {1, 5, 31, 32, 33, 256, 257, 1024})
    for (int i = 0; i < 10 * kTimes; ++i)
      for (const OffsAre are : {OffsAre::kGood, OffsAre::kWrongHereAndThere, OffsAre::kAnything}) {
        const int rows = 3000;
        const std::vector<int32_t> offs = random_offs(random, groups, rows, are);
        const Panels panels = panels_of(offs, rows);
        const int64_t alignment = random.pick({1, 16, 24, 128, 1000});
        const int64_t first = random.between(0, groups);
        std::vector<Panel> all = walk(panels, alignment);
        std::vector<int> times(groups, 0);
        CtaOnHost::instance().run(cuda::kThreads, LaneOrder::kUp, [&] {
          cuda::for_each_group(panels, alignment, search, [&](const Panel& panel) {
            ++times[panel.index];
            EXPECT_TRUE(equal(panel, all[panel.index]));
          });
          __syncthreads();
          const int64_t end = cuda::end_of_groups(panels, first, search);
          EXPECT_EQ(end, first ? all[first - 1].begin + all[first - 1].rows : 0);
        });
        ASSERT_EQ(times, std::vector<int>(groups, 1));
        ASSERT_FALSE(::testing::Test::HasFailure()) << ::testing::PrintToString(offs);
      }
}

TEST(GroupSearch, CutsPanelsOfOneSizeWithoutOffs) {
  for (const int64_t rows : {1, 127, 128, 129, 400})
    for (const int64_t count : {1, 3}) {
      const Panels panels{
          .rows = rows, .cols = 1, .count = count, .offs = nullptr, .weights = count > 1};
      std::vector<int> times(panels.total_rows(), 0);
      static cuda::RowTileSearch search;
      CtaOnHost::instance().run(cuda::kThreads, LaneOrder::kUp, [&] {
        for (int64_t t = 0; t < cuda::num_row_tiles(panels, 32, rows); ++t) {
          const cuda::RowTile& tile = cuda::find_row_tile(panels, 32, t, search);
          if (threadIdx.x == 0)
            for (int64_t r = tile.row; r < std::min(tile.row + cuda::kTileRows, rows); ++r)
              ++times[tile.panel.begin + r];
          __syncthreads();
        }
      });
      ASSERT_EQ(times, std::vector<int>(panels.total_rows(), 1));
    }
}

}  // namespace
}  // namespace moxie::testing
