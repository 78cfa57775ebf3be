// choose_tile(), which picks the tile of the Hopper GEMM from sizes alone, so these tests need no
// GPU.
#include "moxie/core/gemm/choose_tile.h"

#include <gtest/gtest.h>

namespace moxie {
namespace {

TileChoice choose(int64_t groups, int64_t rows, int64_t n, int64_t k, Ragged ragged = Ragged::kRows,
                  int multiprocessors = 132) {
  return choose_tile({.ragged = ragged,
                      .groups = groups,
                      .rows = rows,
                      .n = n,
                      .k = k,
                      .pairs = multiprocessors / 2});
}

TEST(ChooseTile, TakesTheTallTileWhereRowsAreMany) {
  EXPECT_EQ(choose(8, 131072, 8192, 5120).rows, 192);
  EXPECT_EQ(choose(8, 131072, 2048, 7168).rows, 192);
  EXPECT_EQ(choose(8, 131072, 7168, 2048).rows, 192);
  EXPECT_EQ(choose(32, 65536, 2048, 7168).rows, 192);
  EXPECT_EQ(choose(8, 8 * 2048, 7168, 16384, Ragged::kDepth).rows, 192);
}

TEST(ChooseTile, TakesTheFlatTileWhereGroupsAreSmallOrTilesFew) {
  EXPECT_EQ(choose(256, 256 * 64, 2048, 7168).rows, 128) << "most of a tall tile would be empty";
  EXPECT_EQ(choose(1, 1024, 1024, 1024).rows, 128) << "24 tall pairs, 32 flat ones";
  EXPECT_EQ(choose(1, 1024, 1024, 1024, Ragged::kDepth).rows, 128) << "24 tall pairs, 32 flat ones";
}

TEST(ChooseTile, KeepsABandOfColumnsInCache) {
  EXPECT_EQ(choose(8, 131072, 7168, 2048).band, 28) << "all of b fits";
  EXPECT_EQ(choose(8, 131072, 8192, 5120).band, 11) << "three bands of nearly equal width";
  const TileChoice wide = choose(8, 131072, 16384, 16384);
  EXPECT_GE(wide.band, 8);
  EXPECT_LT(wide.band, 64);
  EXPECT_EQ(choose(1, 128, 16, 16).band, 1);
}

TEST(ChooseTile, CutsRoundsOfWgradSoThatTheyReadLittle) {
  EXPECT_EQ(choose(8, 8 * 2048, 7168, 16384, Ragged::kDepth).band, 6) << "66 pairs: 11 x 6";
  EXPECT_EQ(choose(8, 8 * 7168, 2048, 16384, Ragged::kDepth).band, 8) << "no more columns than 8";
  EXPECT_EQ(choose(8, 8 * 8192, 5120, 16384, Ragged::kDepth).band, 7) << "43 x 20 in squares";
}

TEST(ChooseTile, CountsTheRoundsOfTheDeviceAtHand) {
  const auto rows = [](int multiprocessors) {
    return choose(1, 1024, 2048, 4096, Ragged::kRows, multiprocessors).rows;
  };
  EXPECT_EQ(rows(132), 192) << "one round of 48 tall pairs, two of 72 flat ones";
  EXPECT_EQ(rows(114), 192);
  EXPECT_EQ(rows(78), 128) << "two rounds of either";
  const auto band = [](int multiprocessors) {
    return choose(8, 8 * 8192, 5120, 16384, Ragged::kDepth, multiprocessors).band;
  };
  EXPECT_EQ(band(132), 7);
  EXPECT_EQ(band(114), 8);
  EXPECT_EQ(band(78), 5);
}

TEST(ChooseTile, TakesAnyProblem) {
  for (const Ragged ragged : {Ragged::kRows, Ragged::kDepth})
    for (const int64_t groups : {1, 7, 1024})
      for (const int64_t rows : {0, 1, 100000})
        for (const int64_t n : {16, 4096})
          for (const int multiprocessors : {0, 1, 2, 78, 114, 132, 144}) {
            const TileChoice tile = choose(groups, rows, n, 0, ragged, multiprocessors);
            EXPECT_TRUE(tile.rows == 128 || tile.rows == 192);
            EXPECT_GE(tile.band, 1);
          }
}

}  // namespace
}  // namespace moxie
