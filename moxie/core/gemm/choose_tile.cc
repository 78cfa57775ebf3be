#include "moxie/core/gemm/choose_tile.h"

#include <limits>

#include "moxie/core/base/math.h"

namespace moxie {
namespace {

constexpr int64_t kPairColumns = 256;

// The tiles of a group.
struct Grid {
  int64_t rows;           // of a tile
  int64_t down, columns;  // tiles
  int64_t band = 0;       // of columns
};

int64_t pairs_of(const GemmProblem& p) { return max(p.pairs, 1); }

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
  return ceil_div(tiles, pairs_of(p)) * rows * percent;
}

// The columns of b in a band are read again for each tile down the rows, so they should stay in L2,
// of which each half keeps what its multiprocessors read, and results and a's rows take their
// share. Eight by eight pairs of tiles in flight read the least where b does not fit.
int64_t band_in_cache(const GemmProblem& p) {
  constexpr int64_t kBandBytes = 16 << 20;
  const int64_t fits = kBandBytes / (kPairColumns * max<int64_t>(p.k, 1));
  const int64_t pairs = max<int64_t>(ceil_div(p.n, kPairColumns), 1);
  return ceil_div(pairs, ceil_div(pairs, max<int64_t>(fits, 8)));
}

// Rows of a and b that a round of tiles reads in wgrad, if each is read once: tiles [begin, end) of
// a group's, which come in bands of columns and row after row in a band.
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

// What is left over counts as a round. More than some rounds of a large matrix are not counted: the
// host has no time for it.
int64_t rows_of_rounds(const Grid& grid, int64_t pairs) {
  constexpr int64_t kMostRounds = 64;
  int64_t rows = 0;
  const int64_t tiles = min(grid.down * grid.columns, kMostRounds * pairs);
  for (int64_t begin = 0; begin < tiles; begin += pairs)
    rows += rows_of_round(grid, begin, min(begin + pairs, tiles));
  return rows;
}

// The band with which wgrad's rounds read the least. Rounds are about as wide as high in bands of
// 0.6 to 1.5 times the square root of their pairs: 5 to 12 of 66.
int64_t band_of_rounds(const GemmProblem& p, int64_t rows) {
  Grid grid{.rows = rows,
            .down = ceil_div(p.rows / max<int64_t>(p.groups, 1), rows),
            .columns = max<int64_t>(ceil_div(p.n, kPairColumns), 1)};
  int64_t best = 1, least = std::numeric_limits<int64_t>::max();
  const int64_t pairs = pairs_of(p);
  for (grid.band = 1; 4 * grid.band * grid.band <= 9 * pairs; ++grid.band) {
    if (25 * grid.band * grid.band < 9 * pairs) continue;
    if (const int64_t read = rows_of_rounds(grid, pairs); read < least)
      best = grid.band, least = read;
  }
  return min(best, grid.columns);
}

}  // namespace

TileChoice choose_tile(const GemmProblem& p) {
  // A flat tile reads 29 % more bytes per FLOP from L2, and its two warpgroups have no time to
  // spare.
  const bool is_tall = expected_time(p, kTallRows, 100) <= expected_time(p, kFlatRows, 115);
  const int64_t rows = is_tall ? kTallRows : kFlatRows;
  const int64_t band = p.ragged == Ragged::kRows ? band_in_cache(p) : band_of_rounds(p, rows);
  return {.rows = static_cast<int>(rows), .band = static_cast<int>(band)};
}

}  // namespace moxie
