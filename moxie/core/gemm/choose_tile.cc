#include "moxie/core/gemm/choose_tile.h"

#include <limits>

#include "moxie/core/base/math.h"

namespace moxie {
namespace {

constexpr int64_t kPairColumns = 256;  // columns of the result that a pair of CTAs computes

// The grid of tiles of a group.
struct Grid {
  int64_t rows;           // rows of a tile
  int64_t down, columns;  // number of tiles in each direction
  int64_t band = 0;       // width of a band, in columns of tiles
};

int64_t pairs_of(const GemmProblem& p) { return max(p.pairs, 1); }

// The expected number of rows of tiles: if rows are ragged, a group wastes half a tile on average.
int64_t expected_rows_of_tiles(const GemmProblem& p, int64_t rows) {
  const int64_t groups = max<int64_t>(p.groups, 1);
  if (p.ragged == Ragged::kDepth) return groups * ceil_div(p.rows / groups, rows);
  return ceil_div<int64_t>(ceil_div(2 * p.rows, rows) + groups, 2);
}

// An estimate of the time: the number of rounds (in a round each CTA pair takes one tile), times
// the rows of a tile, times the cost of a row in percent of a tall tile's.
int64_t expected_time(const GemmProblem& p, int64_t rows, int64_t percent) {
  const int64_t tiles = expected_rows_of_tiles(p, rows) * ceil_div(p.n, kPairColumns);
  return ceil_div(tiles, pairs_of(p)) * rows * percent;
}

// The band of forward and dgrad. The part of b that a band needs is read again for each row of
// tiles, so it should stay in L2. If it does not fit, 8 x 8 tiles of CTA pairs in flight read the
// least.
int64_t band_in_cache(const GemmProblem& p) {
  // L2 has 50 MB, and each half caches what its own SMs read; 16 of 25 MB leave room for a and out.
  constexpr int64_t kBandBytes = 16 << 20;
  const int64_t fits = kBandBytes / (kPairColumns * max<int64_t>(p.k, 1));
  const int64_t pairs = max<int64_t>(ceil_div(p.n, kPairColumns), 1);
  return ceil_div(pairs, ceil_div(pairs, max<int64_t>(fits, 8)));
}

// For wgrad: the number of rows of a and b that one round reads if each is read once. The round has
// tiles [begin, end) of a group, which are numbered in bands of columns and row by row within a
// band.
int64_t rows_of_round(const Grid& grid, int64_t begin, int64_t end) {
  int64_t down = 0, across = 0;
  for (int64_t first = begin / (grid.band * grid.down) * grid.band; first * grid.down < end;
       first += grid.band) {
    const int64_t width = min(grid.band, grid.columns - first), before = first * grid.down;
    const int64_t from = max(begin, before), to = min(end, before + width * grid.down);
    down += ceil_div(to - before, width) - (from - before) / width;
    across += min(to - from, width);
  }
  return min(down, grid.down) * grid.rows + across * kPairColumns;
}

// Sums rows_of_round() over all rounds, of which the last may be partial. At most kMostRounds are
// counted, to bound the host time of a launch.
int64_t rows_of_rounds(const Grid& grid, int64_t pairs) {
  constexpr int64_t kMostRounds = 64;
  int64_t rows = 0;
  const int64_t tiles = min(grid.down * grid.columns, kMostRounds * pairs);
  for (int64_t begin = 0; begin < tiles; begin += pairs)
    rows += rows_of_round(grid, begin, min(begin + pairs, tiles));
  return rows;
}

// The band with which wgrad's rounds read the least. Only bands of 0.6 to 1.5 times the square root
// of the number of pairs (5 to 12 for 66 pairs) are tried: rounds are then about as wide as high.
int64_t band_of_rounds(const GemmProblem& p, int64_t rows) {
  Grid grid{.rows = rows,
            .down = ceil_div(p.rows / max<int64_t>(p.groups, 1), rows),
            .columns = max<int64_t>(ceil_div(p.n, kPairColumns), 1)};
  int64_t best = 1, least = std::numeric_limits<int64_t>::max();
  const int64_t pairs = pairs_of(p);
  for (grid.band = 1; 4 * grid.band * grid.band <= 9 * pairs; ++grid.band) {
    if (25 * grid.band * grid.band < 9 * pairs) continue;
    if (const int64_t read = rows_of_rounds(grid, pairs); read < least) {
      best = grid.band;
      least = read;
    }
  }
  return min(best, grid.columns);
}

}  // namespace

TileChoice choose_tile(const GemmProblem& p) {
  // A row of a flat tile costs 115 % of a tall one's: it reads 29 % more bytes per FLOP from L2,
  // and two warpgroups hide less of each other's promotion.
  const bool is_tall = expected_time(p, kTallRows, 100) <= expected_time(p, kFlatRows, 115);
  const int64_t rows = is_tall ? kTallRows : kFlatRows;
  const int64_t band = p.ragged == Ragged::kRows ? band_in_cache(p) : band_of_rounds(p, rows);
  return {.rows = static_cast<int>(rows), .band = static_cast<int>(band)};
}

}  // namespace moxie
