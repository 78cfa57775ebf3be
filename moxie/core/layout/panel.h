// Where a panel (group_walk.h) is in an operand. All backends call these functions, so that no
// layout is written twice.
#pragma once

#include <cstdint>
#include <optional>

#include "moxie/core/base/math.h"
#include "moxie/core/format/block.h"
#include "moxie/core/format/e8m0.h"
#include "moxie/core/layout/group_walk.h"
#include "moxie/core/layout/shape.h"
#include "moxie/core/layout/swizzle.h"

namespace moxie {

// The place of a panel in an operand [outer, k].
struct Place {
  int64_t qdata = 0;         // index of the panel's element (0, 0) in qdata
  int64_t qdata_stride = 0;  // elements from one outer index to the next
  int64_t scale = 0;         // index of the panel's first scale
  // The unit depends on the layout. Plain: number of scales from one outer block to the next.
  // Swizzled: number of scale tiles in a row of tiles. Quads: bytes from one quad to the next along
  // k.
  int64_t scale_stride = 0;
  int64_t outer = 0;  // outer elements of the panel
  int64_t k = 0;      // contraction elements, including the padding of a group
  // Only for quads: number of blocks along k before the panel, and in the whole matrix.
  int64_t first_block = 0, num_blocks = 0;
};

// ceil(count / side) with a shift, because kernels call it on their critical path. `side` is a side
// of a block: 1, 32 or 128.
constexpr int64_t blocks_of(int64_t count, int side) {
  static_assert(sides_are<1, 32, 128>());
  const int shift = side == 1 ? 0 : side == 32 ? 5 : 7;
  return (count + side - 1) >> shift;
}

constexpr Place place_of(const Panels& p, const Panel& panel, Form form, Block block,
                         ScaleLayout layout) {
  const bool grouped = p.offs != nullptr;
  const int outer_block = outer_of(block, form), k_block = k_of(block, form);
  if (p.weights || form == Form::kRowwise) {
    // Weights hold one matrix per group, and rowwise tokens are not padded: a panel's elements
    // begin where its first row begins in x.
    const bool rowwise = form == Form::kRowwise;
    const int64_t outer = rowwise ? panel.rows : p.cols, k = rowwise ? p.cols : panel.rows;
    const int64_t k_blocks = blocks_of(k, k_block);
    Place place{.qdata = panel.begin * p.cols, .qdata_stride = k, .outer = outer, .k = k};
    // With offs, rowwise blocks are one row tall (check_operand_block), so panel.begin is also the
    // panel's first row of scales.
    const int64_t outer_blocks = blocks_of(grouped ? p.rows : outer, outer_block);
    const int64_t first = grouped ? panel.begin : panel.index * outer_blocks;
    switch (layout) {
      case ScaleLayout::kPlain:
        place.scale_stride = k_blocks;
        place.scale = first * k_blocks;
        break;
      case ScaleLayout::kSwizzled: {
        const int64_t tiled = grouped ? panel.tiled : panel.index * round_up(outer, kScaleTileRows);
        place.scale_stride = ceil_div(ceil_div<int64_t>(k, kMxBlock), kScaleTileCols);
        place.scale = tiled * place.scale_stride * kScaleTileCols;
        break;
      }
      case ScaleLayout::kQuads:
        place.scale_stride = outer_blocks * kQuad;
        place.scale = grouped ? first * kQuad : first * round_up<int64_t>(k_blocks, kQuad);
        place.num_blocks = k_blocks;
        break;
    }
    return place;
  }
  // Colwise tokens: all panels follow each other along k in one buffer, each padded to its block.
  const int64_t buffer_k =
      colwise_k<int64_t>(p.rows, grouped ? std::optional<int64_t>(p.count) : std::nullopt, k_block);
  const int64_t buffer_blocks = blocks_of(buffer_k, k_block);
  Place place{.qdata = panel.padded, .qdata_stride = buffer_k, .outer = p.cols};
  place.k = blocks_of(panel.rows, k_block) * k_block;
  switch (layout) {
    case ScaleLayout::kPlain:
      place.scale = blocks_of(panel.padded, k_block);
      place.scale_stride = buffer_blocks;
      break;
    case ScaleLayout::kSwizzled:
      place.scale = round_up(p.cols, kScaleTileRows) * (panel.tiled / kMxBlock);
      place.scale_stride = ceil_div(place.k / kMxBlock, kScaleTileCols);
      break;
    case ScaleLayout::kQuads:
      place.scale_stride = blocks_of(p.cols, outer_block) * kQuad;
      place.first_block = blocks_of(panel.padded, k_block);
      place.num_blocks = buffer_blocks;
      break;
  }
  return place;
}

// Index of the scale of block (i, j) of a panel, i along outer and j along k. Plain and quads only:
// a block may have many swizzled scales.
constexpr int64_t scale_index(const Place& place, ScaleLayout layout, int64_t i, int64_t j) {
  return place.scale + (layout == ScaleLayout::kPlain
                            ? i * place.scale_stride + j
                            : quad_index(i, place.first_block + j, place.scale_stride));
}

// Stores the scale of block (i, j); in the swizzled layout, once for every 1 x 32 of the block.
constexpr void put_scale(e8m0* scale, const Place& place, Form form, Block block,
                         ScaleLayout layout, int64_t i, int64_t j, e8m0 value) {
  if (layout != ScaleLayout::kSwizzled) {
    scale[scale_index(place, layout, i, j)] = value;
    return;
  }
  const int64_t outer_block = outer_of(block, form), k_block = k_of(block, form);
  const int64_t outer_end = min((i + 1) * outer_block, place.outer);
  const int64_t k_end = ceil_div<int64_t>(min((j + 1) * k_block, place.k), kMxBlock);
  for (int64_t outer = i * outer_block; outer < outer_end; ++outer)
    for (int64_t k = j * (k_block / kMxBlock); k < k_end; ++k)
      scale[place.scale + swizzled_index(outer, k, place.scale_stride)] = value;
}

// The scale of the block that contains element (outer, k) of a panel.
constexpr e8m0 scale_at(const e8m0* scale, const Place& place, Form form, Block block,
                        ScaleLayout layout, int64_t outer, int64_t k) {
  if (layout == ScaleLayout::kSwizzled)
    return scale[place.scale + swizzled_index(outer, k / kMxBlock, place.scale_stride)];
  return scale[scale_index(place, layout, outer / outer_of(block, form), k / k_of(block, form))];
}

}  // namespace moxie
