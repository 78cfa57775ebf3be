// Runs the schedules of the GEMM on a CPU, with one warp per CTA. Together, the pairs of CTAs must
// take every tile exactly once, for any offs and any number of pairs.
#include "tests/support/cta_on_host.h"
// Must come after cta_on_host.h.
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "moxie/core/gemm/schedule_rows.cuh"
#include "moxie/core/gemm/schedule_wgrad.cuh"
#include "tests/support/any_offs.h"

namespace moxie::testing {
namespace {

using sm90::kCluster, sm90::kMaxPairs, sm90::kTileK, sm90::kTileN, sm90::ScheduleParams, sm90::Work;

#if defined(__SANITIZE_ADDRESS__)
constexpr int kMostGroups = 2;
constexpr int kTimes = 1;
#else
constexpr int kMostGroups = 5;
constexpr int kTimes = 10;
#endif

bool equal(const Work& a, const Work& b) {
  return a.group == b.group && a.row == b.row && a.rows == b.rows && a.col == b.col &&
         a.k_begin == b.k_begin && a.k_blocks == b.k_blocks && a.valid == b.valid;
}

// Lists all tiles that the schedule gives one CTA. All lanes of the warp must get the same ones.
template <class Schedule>
void play(const ScheduleParams& p, int pairs, int pair, int cta_in_pair, std::vector<Work>& list) {
  static typename Schedule::Shared shared;
  gridDim.x = static_cast<unsigned>(pairs * kCluster);
  blockIdx.x = static_cast<unsigned>(pair * kCluster + cta_in_pair);
  list.clear();
  const LaneOrder order = pair % 2 ? LaneOrder::kDown : LaneOrder::kUp;
  bool agree = true;
  CtaOnHost::instance().run(cuda::kWarp, order, [&] {
    Schedule schedule(p, shared, cta_in_pair);
    for (size_t i = 0;; ++i) {
      const Work work = schedule.next();
      if (i == list.size()) list.push_back(work);
      agree = agree && equal(work, list[i]);
      if (!work.valid) return;
    }
  });
  ASSERT_TRUE(agree);
  list.pop_back();
}

// Calls f(tile) for every tile of every CTA. The two CTAs of a pair must get neighbouring tiles in
// the same rows; if the second is past the last column, it has 0 rows.
template <class Schedule, class F>
void play_all(const ScheduleParams& p, int pairs, F&& f) {
  static std::vector<Work> list[kCluster];
  for (int pair = 0; pair < pairs; ++pair) {
    // Running the second CTA costs as much as the first, so with many pairs it is checked only in
    // one of them.
    const bool both = pairs < 8 || pair == pairs / 2;
    ASSERT_NO_FATAL_FAILURE(play<Schedule>(p, pairs, pair, 0, list[0]));
    if (both) {
      ASSERT_NO_FATAL_FAILURE(play<Schedule>(p, pairs, pair, 1, list[1]));
      ASSERT_EQ(list[0].size(), list[1].size());
    }
    for (size_t i = 0; i < list[0].size(); ++i) {
      const Work& work = list[0][i];
      ASSERT_LT(work.col, p.n) << "a tile with nothing to do in either CTA";
      Work other = work;
      other.col += kTileN;
      if (other.col >= p.n) other.rows = 0;
      ASSERT_TRUE(!both || equal(other, list[1][i]));
      ASSERT_NO_FATAL_FAILURE(f(work));
      ASSERT_NO_FATAL_FAILURE(f(other));
    }
  }
}

// The ends of the groups as next_panel() gives them; group_walk_test.cc tests next_panel().
std::vector<int> ends_of(const ScheduleParams& p) {
  const Panels panels{
      .rows = p.rows, .cols = 1, .count = p.groups, .offs = p.offs, .weights = false};
  std::vector<int> ends;
  Panel panel = first_panel();
  for (int g = 0; g < p.groups; ++g) {
    panel = next_panel(panels, panel, 1);
    ends.push_back(static_cast<int>(panel.begin + panel.rows));
  }
  return ends;
}

// The schedule of forward and dgrad: in each 128 columns of the result, every row must be in
// exactly one tile, and that tile must have the row's group, or group p.groups for rows past the
// last.
template <class Tile>
void check_rows(const ScheduleParams& p, int pairs) {
  const std::vector<int> ends = ends_of(p);
  const int columns = ceil_div(p.n, kTileN);
  static std::vector<int> times;
  times.assign(static_cast<size_t>(p.rows) * columns, 0);
  play_all<sm90::RowsSchedule<Tile>>(p, pairs, [&](const Work& work) {
    ASSERT_GE(work.group, 0);
    ASSERT_LE(work.group, p.groups);
    ASSERT_EQ(work.k_begin, 0);
    ASSERT_EQ(work.k_blocks, work.group < p.groups ? p.k_blocks : 0);
    ASSERT_EQ(work.col % kTileN, 0);
    if (work.col >= p.n) {
      ASSERT_EQ(work.rows, 0);
      return;
    }
    ASSERT_GT(work.rows, 0);
    ASSERT_LE(work.rows, Tile::kM);
    ASSERT_GE(work.row, work.group == 0 ? 0 : ends[work.group - 1]);
    ASSERT_LE(work.row + work.rows, work.group < p.groups ? ends[work.group] : p.rows);
    for (int row = work.row; row < work.row + work.rows; ++row)
      ++times[static_cast<size_t>(row) * columns + work.col / kTileN];
  });
  ASSERT_TRUE(std::ranges::all_of(times, [](int count) { return count == 1; }));
}

// The schedule of wgrad: every tile of every group's result must be computed once, over the k (rows
// of the tokens) of that group.
template <class Tile>
void check_depth(const ScheduleParams& p, int pairs) {
  const std::vector<int> ends = ends_of(p);
  std::vector<int> k_begin{0};
  for (int g = 0; g < p.groups; ++g)
    k_begin.push_back(k_begin[g] + ceil_div(ends[g] - (g ? ends[g - 1] : 0), kTileK));
  const int columns = ceil_div(p.n, kTileN), down = ceil_div(p.m, Tile::kM);
  static std::vector<int> times;
  times.assign(static_cast<size_t>(p.groups) * down * columns, 0);
  play_all<sm90::WgradSchedule<Tile>>(p, pairs, [&](const Work& work) {
    ASSERT_GE(work.group, 0);
    ASSERT_LT(work.group, p.groups);
    ASSERT_EQ(work.k_begin, k_begin[work.group]);
    ASSERT_EQ(work.k_begin + work.k_blocks, k_begin[work.group + 1]);
    ASSERT_EQ(work.col % kTileN, 0);
    ASSERT_EQ(work.row % Tile::kM, 0);
    ASSERT_EQ(work.rows, work.col < p.n ? std::min(Tile::kM, p.m - work.row) : 0);
    if (work.col < p.n)
      ++times[(static_cast<size_t>(work.group) * down + work.row / Tile::kM) * columns +
              work.col / kTileN];
  });
  ASSERT_TRUE(std::ranges::all_of(times, [](int count) { return count == 1; }));
}

template <Ragged kRagged>
void check(const ScheduleParams& p, int tile_rows, int pairs) {
  if constexpr (kRagged == Ragged::kRows) {
    if (tile_rows == kTallRows) return check_rows<sm90::TallTile<kRagged>>(p, pairs);
    check_rows<sm90::FlatTile<kRagged>>(p, pairs);
  } else {
    if (tile_rows == kTallRows) return check_depth<sm90::TallTile<kRagged>>(p, pairs);
    check_depth<sm90::FlatTile<kRagged>>(p, pairs);
  }
}

ScheduleParams params_of(const std::vector<int32_t>& offs, int rows, int m, int n, int band) {
  return {.offs = offs.data(),
          .groups = static_cast<int>(offs.size()),
          .rows = rows,
          .m = m,
          .n = n,
          .k_blocks = 3,
          .band = band};
}

template <Ragged kRagged>
void check_any_offs() {
  const int rows = 450;
  int i = 0;
  for (int groups = 1; groups <= kMostGroups; ++groups) {
    std::vector<int32_t> values{kInt32Min, 0, 65, 450, kInt32Max};
    if (groups < 5) values.insert(values.end(), {193, 384});
    for_each_offs(groups, values, [&](const auto& offs) {
      if (::testing::Test::HasFatalFailure()) return;
      // i changes the height of the tile, the band, n and the number of pairs from case to case.
      const int tile_rows = i % 2 ? kTallRows : kFlatRows;
      const int band = 1 + i / 2 % 3, n = i / 6 % 2 ? 640 : 768;
      for (const int pairs : {i / 12 % 2 ? 1 : 3, i / 12 % 2 ? 7 : 2})
        ASSERT_NO_FATAL_FAILURE(
            check<kRagged>(params_of(offs, rows, 400, n, band), tile_rows, pairs))
            << ::testing::PrintToString(offs) << " with " << pairs << " pairs and band " << band;
      ++i;
    });
  }
}

template <Ragged kRagged>
void check_any_device() {
  Random random(1);
  for (const int pairs : {1, 2, 3, 7, 39, 57, 66, kMaxPairs})
    for (int i = 0; i < 2 * kTimes; ++i) {
      const auto groups = static_cast<int>(random.pick({1, 2, 5, 8, 33, 64, 65, 200}));
      const auto rows = static_cast<int>(random.between(1, 4000));
      const auto m = static_cast<int>(random.between(1, 8)) * 100;
      const auto n = static_cast<int>(random.between(1, 10)) * 112;
      const auto band = static_cast<int>(random.between(1, ceil_div(n, kTileN * kCluster)));
      const OffsAre are =
          random.pick({OffsAre::kGood, OffsAre::kWrongHereAndThere, OffsAre::kAnything});
      const std::vector<int32_t> offs = random_offs(random, groups, rows, are);
      ASSERT_NO_FATAL_FAILURE(check<kRagged>(params_of(offs, rows, m, n, band),
                                             random.pick({kTallRows, kFlatRows}), pairs))
          << ::testing::PrintToString(offs) << " of " << rows << ", " << m << " x " << n
          << ", pairs " << pairs << ", band " << band;
    }
}

template <Ragged kRagged>
void check_many_groups() {
  Random random(2);
  for (const int groups : {63, 64, 65, 255, 1024})
    for (const OffsAre are : {OffsAre::kGood, OffsAre::kAnything}) {
      const std::vector<int32_t> offs = random_offs(random, groups, 5000, are);
      const ScheduleParams p = params_of(offs, 5000, 130, 300, 1);
      ASSERT_NO_FATAL_FAILURE(check<kRagged>(p, kFlatRows, random.pick({3, 66})))
          << ::testing::PrintToString(offs);
    }
}

TEST(RowsSchedule, CoversEveryRowOnceForAnyOffs) { check_any_offs<Ragged::kRows>(); }
TEST(RowsSchedule, CoversEveryRowOnceOnAnyDevice) { check_any_device<Ragged::kRows>(); }
TEST(RowsSchedule, CoversEveryRowOnceOfManyGroups) { check_many_groups<Ragged::kRows>(); }
TEST(RowsSchedule, TakesRowsInOneGroupWithoutOffs) {
  const ScheduleParams p{
      .offs = nullptr, .groups = 1, .rows = 1000, .m = 0, .n = 384, .k_blocks = 2, .band = 2};
  check<Ragged::kRows>(p, kTallRows, 3);
  check<Ragged::kRows>(p, kFlatRows, 66);
}

TEST(WgradSchedule, TakesEveryTileOnceForAnyOffs) { check_any_offs<Ragged::kDepth>(); }
TEST(WgradSchedule, TakesEveryTileOnceOnAnyDevice) { check_any_device<Ragged::kDepth>(); }
TEST(WgradSchedule, TakesEveryTileOnceOfManyGroups) { check_many_groups<Ragged::kDepth>(); }

// Compares a queue of pairs of CTAs, ordered by when they will be free, with a sorted list of exact
// times. `make(pairs, me)` returns a queue.
template <class Make>
void check_queue(Make&& make, const std::vector<int64_t>& longest_times, int most) {
  Random random(3);
  for (const int pairs : {1, 2, 3, 31, 32, 33, 39, 57, 63, 64, 65, 66, kMaxPairs})
    for (const int64_t longest : longest_times) {
      std::vector<int> counts, times;
      for (int i = 0; i < 40 * kTimes; ++i) {
        counts.push_back(static_cast<int>(random.between(1, pairs)));
        times.push_back(static_cast<int>(random.between(0, longest)));
      }
      const auto me = static_cast<int>(random.between(0, pairs - 1));
      std::vector<int> positions;
      bool agree = true;
      CtaOnHost::instance().run(cuda::kWarp, random.pick({LaneOrder::kUp, LaneOrder::kDown}), [&] {
        auto queue = make(pairs, me);
        for (size_t i = 0; i < counts.size(); ++i) {
          const int position = queue.take(counts[i], times[i]);
          if (i == positions.size()) positions.push_back(position);
          agree = agree && position == positions[i];
        }
      });
      ASSERT_TRUE(agree) << "lanes differ";
      std::vector<std::pair<int64_t, int>> expected;  // when it is free, pair
      for (int pair = 0; pair < pairs; ++pair) expected.push_back({0, pair});
      for (size_t i = 0; i < counts.size(); ++i) {
        int position = -1;
        for (int place = 0; place < counts[i]; ++place) {
          if (expected[place].second == me) position = place;
          expected[place].first += std::min(times[i], most);
        }
        ASSERT_EQ(positions[i], position) << pairs << " pairs, pair " << me << ", run " << i;
        std::ranges::sort(expected);
      }
    }
}

TEST(TileQueue, GivesTilesToThePairsThatAreFreeFirst) {
  static uint32_t entries[kMaxPairs];
  // The queue resets its clock after 2^30 / kMaxPairs, and caps a time at 2^20.
  check_queue([](int pairs, int me) { return sm90::TileQueue(entries, pairs, me); },
              {12, 1000, 1 << 20, 1 << 24}, 1 << 20);
}

TEST(BucketQueue, GivesTilesToThePairsThatAreFreeFirst) {
  constexpr int kLongest = sm90::BucketQueue::kLongest;
  check_queue([](int pairs, int me) { return sm90::BucketQueue(pairs, me); }, {1, 10, kLongest},
              kLongest);
}

}  // namespace
}  // namespace moxie::testing
