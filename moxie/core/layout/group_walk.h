// Walks over groups: from offs, whatever it holds, to the rows of each group and to sums over the
// groups before it. Every walk takes these steps: CPU code, reference loops and the GEMM's
// scheduler go group by group, other kernels take many groups at once (group_search.cuh).
#pragma once

#include <cstdint>
#include <type_traits>

#include "moxie/core/base/math.h"
#include "moxie/core/layout/swizzle.h"

namespace moxie {

// A panel is a range of rows that is quantized on its own: one group of a token tensor, or one
// matrix of weights. Blocks never cross panels. Panels describes how the rows of x [R, C] or [G, N,
// K] are divided into panels.
struct Panels {
  int64_t rows;         // R; or N, the rows of one matrix
  int64_t cols;         // C; or K
  int64_t count;        // G; 1 for tokens without offs
  const int32_t* offs;  // [G] exclusive ends; nullptr: weights, or tokens in one group
  bool weights;         // x is [G, N, K]

  constexpr int64_t total_rows() const { return weights ? count * rows : rows; }
};

struct Panel {
  int64_t index;   // g
  int64_t begin;   // first row in x, seen as [total rows, cols]
  int64_t rows;    // may be 0: an expert may receive no tokens
  int64_t padded;  // sum over the panels before it of their rows, each rounded up to the alignment
  // Sum over the panels before it of their rows, each rounded up to the alignment and then to
  // kScaleTileRows. Used only for swizzled scales, whose alignment divides kScaleTileRows.
  int64_t tiled;
};

// The end of a group that begins at row `begin` of a tensor of `rows` rows. Clamps offs to [begin,
// rows]: an end that is too small makes the group empty, and one past the last row becomes that
// row. So malformed offs never lead out of bounds on a GPU; on a CPU they are refused earlier.
template <class Int>
constexpr Int group_end(int32_t offs, Int begin, Int rows) {
  static_assert(std::is_signed_v<Int>, "offs may be negative");
  return max(min(static_cast<Int>(offs), rows), begin);
}

// round_up(), but without a division if the alignment is a power of two, because kernels call it on
// their critical path.
template <class Int>
constexpr Int align_up(Int rows, Int alignment) {
  if (alignment & (alignment - 1)) return round_up(rows, alignment);
  return (rows + alignment - 1) & -alignment;
}

// Where rows are cut into tiles of kScaleTileRows. A tile never holds rows of two panels.
enum class Cut {
  kAtPanels,  // a panel's first tile begins at the panel's first row
  // At multiples of kScaleTileRows of a colwise buffer, so that a column of a tile is one aligned
  // piece of 128 bytes, not parts of two. A panel's first tile may begin before the panel.
  kInBuffer,
};

// Number of tiles of a group of `rows` rows (padding included), if the groups before it take
// `padded` rows of the buffer.
template <Cut kCut, class Int>
constexpr Int tiles_of_group(Int padded, Int rows) {
  constexpr Int kTile = kScaleTileRows;
  const Int before = kCut == Cut::kInBuffer && rows > 0 ? padded % kTile : 0;
  return ceil_div(before + rows, kTile);
}

// Sums over the groups before a group.
template <class Int>
struct GroupSums {
  Int begin = 0;        // sum of the rows: the first row of the group
  Int padded = 0;       // sum of the rows, each group's rounded up to the alignment
  Int tiles = 0;        // number of row tiles, for the Cut that add() is given
  Int scale_tiles = 0;  // number of tiles of swizzled scales, which are always cut at panels

  // Adds a group that has `rows` rows, and `padded_rows` rows with its padding.
  template <Cut kCut>
  constexpr void add(Int rows, Int padded_rows) {
    tiles += tiles_of_group<kCut>(padded, padded_rows);
    begin += rows;
    padded += padded_rows;
    scale_tiles += tiles_of_group<Cut::kAtPanels, Int>(0, padded_rows);
  }

  constexpr Panel panel(int64_t index, Int rows) const {
    return {.index = index,
            .begin = begin,
            .rows = rows,
            .padded = padded,
            .tiled = int64_t{scale_tiles} * kScaleTileRows};
  }
};

constexpr Panel first_panel() { return {-1, 0, 0, 0, 0}; }

// The panel after `before`. `alignment` is the rows of a block of the colwise form, or 1 if that
// form is not made.
constexpr Panel next_panel(const Panels& panels, const Panel& before, int64_t alignment) {
  GroupSums<int64_t> sums{
      .begin = before.begin, .padded = before.padded, .scale_tiles = before.tiled / kScaleTileRows};
  sums.add<Cut::kAtPanels>(before.rows, align_up(before.rows, alignment));
  const int64_t index = before.index + 1;
  if (!panels.offs) return sums.panel(index, panels.rows);
  return sums.panel(index, group_end(panels.offs[index], sums.begin, panels.rows) - sums.begin);
}

}  // namespace moxie
