// copy_rows on every backend of this machine. Bytes that it must not write are compared, too.
#include "moxie/core/copy_rows/copy_rows.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "moxie/core/base/check.h"
#include "tests/support/backends.h"
#include "tests/support/random.h"
#include "tests/support/values.h"

namespace moxie::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

// Runs of rows with gaps between them, as messages of several ranks have.
struct Layout {
  std::vector<RowRun> runs;
  int64_t rows = 0, bytes = 0;
};

Layout random_layout(Random& random, int64_t runs, int64_t stride) {
  Layout layout;
  for (int64_t i = 0; i < runs; ++i) {
    layout.bytes += random.between(0, 40);
    layout.runs.push_back({layout.rows, layout.bytes});
    const int64_t rows = random.between(0, 3);  // a rank may send none
    layout.rows += rows;
    layout.bytes += rows * stride;
  }
  layout.bytes += random.between(0, 40);
  return layout;
}

int64_t begin_in(const Layout& layout, int64_t row, int64_t stride) {
  int64_t begin = -1;
  for (const RowRun& run : layout.runs)
    if (run.first <= row) begin = run.begin + (row - run.first) * stride;
  return begin;
}

void check_random_copies(const NamedExec& on) {
  Random random(1);
  for (int i = 0; i < 60; ++i) {
    const auto width = random.pick<int64_t>({1, 4, 8, 16, 24, 48, 112, 144, 1000, 7184});
    const int64_t stride = width + random.pick<int64_t>({0, 0, 8, 16, 3});
    const auto runs = random.pick<int64_t>({1, 1, 2, 5, 129, 300});
    const Layout apart = random_layout(random, runs, stride);
    // The other side is a matrix, of which an index names as many rows, in any order.
    std::vector<int64_t> index(static_cast<size_t>(apart.rows + random.between(0, 9)));
    std::iota(index.begin(), index.end(), int64_t{0});
    for (size_t j = index.size(); j > 1; --j)
      std::swap(index[j - 1], index[static_cast<size_t>(random.below(static_cast<int64_t>(j)))]);
    const auto matrix_bytes = index.size() * static_cast<size_t>(width);
    const auto apart_bytes = static_cast<size_t>(apart.bytes);
    index.resize(static_cast<size_t>(apart.rows));
    const bool into_runs = random.chance(50);
    std::vector<std::byte> source(into_runs ? matrix_bytes : apart_bytes);
    for (std::byte& byte : source) byte = static_cast<std::byte>(random.below(256));
    std::vector<std::byte> expected(into_runs ? apart_bytes : matrix_bytes, std::byte{0xa5});
    Values<std::byte> from(on.exec.backend, source), to(on.exec.backend, expected);
    Values<int64_t> chosen(on.exec.backend, index);
    for (int64_t r = 0; r < apart.rows; ++r) {
      const int64_t in_matrix = index[static_cast<size_t>(r)] * width;
      const int64_t in_run = begin_in(apart, r, stride);
      std::copy_n(source.begin() + (into_runs ? in_matrix : in_run), width,
                  expected.begin() + (into_runs ? in_run : in_matrix));
    }
    RowsIn<const std::byte> in{.buffer = from.const_view(), .stride = width};
    RowsIn<std::byte> out{.buffer = to.view(), .stride = width};
    if (into_runs) {
      in.index = chosen.const_view();
      out.stride = stride, out.runs = apart.runs;
    } else {
      out.index = chosen.const_view();
      in.stride = stride, in.runs = apart.runs;
    }
    copy_rows({.rows = apart.rows, .width = width, .from = in, .to = out}, on.exec);
    ASSERT_EQ(to.read(), expected) << on.name << ", case " << i;
  }
}

TEST(CopyRows, PutsEachRowWhereItsRunSaysAndWritesNothingElse) {
  check_random_copies({"ref", {.backend = Backend::kRef}});
  for (const NamedExec& on : backends_here()) check_random_copies(on);
}

TEST(CopyRows, SeveralCopiesAreThoseOfEach) {
  Random random(2);
  for (const NamedExec& on : backends_here()) {
    std::vector<Values<std::byte>> sources, targets;
    std::vector<std::vector<std::byte>> expected;
    std::vector<CopyRowsArgs> copies;
    for (const int64_t width : {7184, 16, 8, 0, 4, 48, 1, 200, 16}) {
      const int64_t rows = random.pick<int64_t>({0, 1, 300}), stride = width + 8;
      std::vector<std::byte> source(rows * width);
      for (std::byte& byte : source) byte = static_cast<std::byte>(random.below(256));
      std::vector<std::byte> target(rows * stride, std::byte{0xa5});
      sources.emplace_back(on.exec.backend, source);
      targets.emplace_back(on.exec.backend, target);
      for (int64_t r = 0; r < rows; ++r)
        std::copy_n(source.begin() + r * width, width, target.begin() + r * stride);
      expected.push_back(target);
      copies.push_back({.rows = rows,
                        .width = width,
                        .from = {.buffer = sources.back().const_view(), .stride = width},
                        .to = {.buffer = targets.back().view(), .stride = stride}});
    }
    copy_rows(copies, on.exec);
    for (size_t i = 0; i < targets.size(); ++i)
      EXPECT_EQ(targets[i].read(), expected[i]) << on.name << ", copy " << i;
    copy_rows(std::vector<CopyRowsArgs>{}, on.exec);
  }
}

TEST(CopyRows, RepeatsARowWithAStrideOfZero) {
  std::vector<std::byte> zeros(8), to(40, std::byte{1});
  copy_rows({.rows = 2,
             .width = 8,
             .from = {.buffer = {zeros.data(), {8}}, .stride = 0},
             .to = {.buffer = {to.data(), {40}}, .stride = 20, .runs = {{0, 12}}}},
            {.backend = Backend::kRef});
  for (size_t i = 0; i < to.size(); ++i)
    EXPECT_EQ(to[i], i % 20 >= 12 ? std::byte{0} : std::byte{1}) << i;
}

TEST(CopyRows, RefusesRowsOutsideABuffer) {
  std::vector<std::byte> from(32), to(40);
  const std::vector<int64_t> index{0, 2};
  const auto run = [&](std::optional<View<const int64_t>> chosen, int64_t begin,
                       int64_t stride = 16) {
    copy_rows({.rows = 2,
               .width = 16,
               .from = {.buffer = {from.data(), {32}}, .stride = 16, .index = chosen},
               .to = {.buffer = {to.data(), {40}}, .stride = stride, .runs = {{0, begin}}}},
              {.backend = Backend::kRef});
  };
  EXPECT_NO_THROW(run({}, 8));
  EXPECT_THAT([&] { run({}, 9); },
              ThrowsMessage<Error>(HasSubstr("copy_rows: row 1 of to must lie in its buffer of 40 "
                                             "bytes, got bytes 25 to 41")));
  EXPECT_THAT([&] { run({}, 0, 15); },
              ThrowsMessage<Error>(HasSubstr("rows of to must not overlap, got a stride of 15")));
  EXPECT_THAT(
      [&] {
        run(View<const int64_t>{index.data(), {2}}, 0);
      },
      ThrowsMessage<Error>(HasSubstr("row 1 of from must lie in its buffer of 32 bytes")));
}

}  // namespace
}  // namespace moxie::testing
