#include "moxie/core/gemm/choose_tile.h"

#include "moxie/core/base/math.h"

namespace moxie {
namespace {

constexpr int64_t kPairs = 66;  // of CTAs that run at a time, on the 132 multiprocessors of an H200
constexpr int64_t kPairColumns = 256;

// Rows of tiles. Where groups are ragged in rows, half a tile is expected to lie past the last of
// each.
int64_t expected_rows_of_tiles(const GemmProblem& p, int64_t rows) {
  const int64_t groups = max<int64_t>(p.groups, 1);
  if (p.ragged == Ragged::kDepth) return groups * ceil_div(p.rows / groups, rows);
  return ceil_div<int64_t>(ceil_div(2 * p.rows, rows) + groups, 2);
}

// Time in units of what a row of a tall tile takes: rounds of tiles times rows of a tile.
int64_t expected_time(const GemmProblem& p, int64_t rows, int64_t percent) {
  const int64_t tiles = expected_rows_of_tiles(p, rows) * ceil_div(p.n, kPairColumns);
  return ceil_div(tiles, kPairs) * rows * percent;
}

}  // namespace

TileChoice choose_tile(const GemmProblem& p) {
  // A flat tile reads 29 % more bytes per FLOP from L2, and its two warpgroups have no time to
  // spare.
  const bool is_tall = expected_time(p, kTallRows, 100) <= expected_time(p, kFlatRows, 115);
  // The columns of b in a band are read again for each tile down the rows, so they should stay in
  // L2, of which each half keeps what its multiprocessors read, and results and a's rows take their
  // share. Eight by eight pairs of tiles in flight read the least where b does not fit.
  constexpr int64_t kBandBytes = 16 << 20;
  const int64_t fits = kBandBytes / (kPairColumns * max<int64_t>(p.k, 1));
  const int64_t pairs = max<int64_t>(ceil_div(p.n, kPairColumns), 1);
  const int64_t bands = ceil_div(pairs, max<int64_t>(fits, 8)), band = ceil_div(pairs, bands);
  return {.rows = is_tall ? kTallRows : kFlatRows, .band = static_cast<int>(band)};
}

}  // namespace moxie
