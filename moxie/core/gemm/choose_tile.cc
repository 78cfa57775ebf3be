#include "moxie/core/gemm/choose_tile.h"

#include "moxie/core/base/math.h"

namespace moxie {
namespace {

constexpr int64_t kPairs = 66;  // of CTAs that run at a time, on the 132 multiprocessors of an H200
constexpr int64_t kPairColumns = 256;

// Time in units of what a row of a tall tile takes: rounds of tiles times rows of a tile. Half a
// tile per group is expected to lie past the group's last row.
int64_t expected_time(const GemmProblem& p, int64_t rows, int64_t percent) {
  const int64_t half_tiles = ceil_div(2 * p.rows, rows) + p.groups;
  const int64_t tiles = ceil_div<int64_t>(half_tiles, 2) * ceil_div(p.n, kPairColumns);
  return ceil_div(tiles, kPairs) * rows * percent;
}

}  // namespace

TileChoice choose_tile(const GemmProblem& p) {
  // A flat tile reads a fifth more bytes per FLOP, and its two warpgroups have no time
  // to spare; see docs/kernels/grouped_gemm.md, "Tiles".
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
