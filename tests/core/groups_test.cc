#include "moxie/core/groups/groups.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "tests/support/any_offs.h"
#include "tests/support/arena.h"
#include "tests/support/backends.h"

namespace moxie::testing {
namespace {

struct Padded {
  std::vector<std::byte> rows;
  std::vector<int32_t> starts, ends;
  int64_t count;
};

Padded pad(const std::vector<std::byte>& x, Shape shape, const std::vector<int32_t>& offs,
           int64_t alignment, const Exec& exec = {}) {
  const auto groups = static_cast<int64_t>(offs.size());
  const int64_t count = pad_groups_rows(shape[0], groups, alignment);
  Padded out{std::vector<std::byte>(count * shape[1], std::byte{0xa5}),
             std::vector<int32_t>(groups), std::vector<int32_t>(groups), count};
  pad_groups({.x = {x.data(), shape},
              .offs = {offs.data(), {groups}},
              .alignment = alignment,
              .padded = {out.rows.data(), {count, shape[1]}},
              .starts = {out.starts.data(), {groups}},
              .ends = {out.ends.data(), {groups}}},
             exec);
  return out;
}

TEST(PadGroups, StartsEachGroupAtAMultipleOfTheAlignmentAndKeepsEmptyGroupsEmpty) {
  Random random(1);
  const Shape shape{70, 5};
  const auto x = random_bytes<std::byte>(random, numel(shape));
  const auto out = pad(x, shape, {1, 1, 33, 65}, 32);
  EXPECT_EQ(out.count, 224);  // round_up(70 + 4 * 32, 32)
  EXPECT_EQ(out.starts, (std::vector<int32_t>{0, 32, 32, 64}));
  EXPECT_EQ(out.ends, (std::vector<int32_t>{32, 32, 64, 96}));
}

TEST(PadGroups, CopiesRowsAndZeroesThePadding) {
  Random random(2);
  const Shape shape{9, 3};
  auto x = random_bytes<std::byte>(random, numel(shape));
  for (auto& value : x) value |= std::byte{1};  // never zero
  const auto out = pad(x, shape, {2, 7}, 4);
  for (int64_t row = 0; row < out.count; ++row) {
    const int64_t from = row < 2 ? row : row >= 4 && row < 9 ? row - 2 : -1;
    for (int64_t c = 0; c < 3; ++c)
      ASSERT_EQ(out.rows[row * 3 + c], from < 0 ? std::byte{0} : x[from * 3 + c]) << row;
  }
}

TEST(UnpadGroups, UndoesPadGroupsForAnyAlignmentAndSize) {
  Random random(3);
  for (int i = 0; i < 200; ++i) {
    const Shape shape{random.between(0, 300), random.between(1, 40)};
    const auto groups = random.pick<int64_t>({1, 3, 33, 1024});
    const auto offs = random_offs(random, shape[0], groups);
    auto x = random_bytes<std::byte>(random, numel(shape));
    std::fill(x.begin() + offs.back() * shape[1], x.end(), std::byte{0});  // no group covers these
    const auto out = pad(x, shape, offs, random.pick<int64_t>({1, 7, 16, 128}));
    std::vector<std::byte> back(x.size(), std::byte{0xa5});
    unpad_groups({.padded = {out.rows.data(), {out.count, shape[1]}},
                  .offs = {offs.data(), {groups}},
                  .starts = {out.starts.data(), {groups}},
                  .x = {back.data(), shape}},
                 {});
    ASSERT_EQ(back, x);
  }
}

// padded_offs gives the ends that are passed to torch's grouped products, which do not check them.
TEST(PaddedOffs, NeverDecreaseOrLeaveTheRowsOnAGpuForAnyOffs) {
  if (!has_cuda_device()) GTEST_SKIP() << "no GPU";
  Random random(4);
  for (int i = 0; i < 300; ++i) {
    const auto rows = random.pick<int64_t>({0, 1, 31, 500, 1 << 20});
    const auto alignment = random.pick<int64_t>({1, 16, 32});
    const auto groups = random.pick<int64_t>({1, 3, 32, 33, 300, 1024});
    const auto offs = random_offs(random, static_cast<int>(groups), static_cast<int>(rows),
                                  random.pick({OffsAre::kWrongHereAndThere, OffsAre::kAnything}));
    Arena arena(Backend::kCuda);
    padded_offs({.offs = arena.input(offs, {groups}),
                 .rows = rows,
                 .alignment = alignment,
                 .padded = arena.output<int32_t>({groups})},
                {.backend = Backend::kCuda});
    const auto result = arena.results()[0];
    const auto* ends = reinterpret_cast<const int32_t*>(result.data());
    const Panels panels{
        .rows = rows, .cols = 1, .count = groups, .offs = offs.data(), .weights = false};
    Panel panel = first_panel();
    for (int64_t g = 0; g < groups; ++g) {
      panel = next_panel(panels, panel, alignment);
      ASSERT_EQ(ends[g], panel.padded + round_up(panel.rows, alignment)) << "group " << g;
    }
    ASSERT_LE(ends[groups - 1], least_padded_rows(rows, groups, alignment));
  }
}

TEST(PaddedRows, IsTheSmallestBufferForAnyGroupsInWholeLines) {
  // Padding is largest if as many groups as possible have one row and the last has all other rows.
  for (const int64_t alignment : {16, 32, 128})
    for (int64_t rows : {0, 1, 5, 127, 128, 1000})
      for (int64_t groups : {1, 2, 8, 100}) {
        int64_t worst = 0;
        for (int64_t ones = 0; ones < groups && ones <= rows; ++ones)
          worst = std::max(worst, ones * alignment + round_up(rows - ones, alignment));
        const int64_t least = least_padded_rows(rows, groups, alignment);
        EXPECT_GE(least, worst);
        if (rows >= groups) {
          EXPECT_EQ(least, worst);
        }
        EXPECT_EQ(padded_rows(rows, groups, alignment),
                  alignment >= 32 ? round_up<int64_t>(least, 256) : least);
      }
}

}  // namespace
}  // namespace moxie::testing
