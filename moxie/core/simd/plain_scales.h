// CPU kernels read plain scales only. For other layouts, the scales of a tile are first copied in
// plain order; the tile is then a small operand of its own.
#pragma once

#include "moxie/core/simd/tile.h"

namespace moxie::cpu {

struct TileCodes {
  static constexpr int kOfTile = kTileRows * kTileCols, kOfRowTile = kRowTileRows * kRowTileCols;
  e8m0 code[max(kOfTile, kOfRowTile) / kMxBlock];
};

struct SourceTile {
  Span span;  // the tile in `in`
  Source in;
};

// Returns the tile with plain scales. in.place must be that of scales in `layout`. The result may
// point into `codes`.
inline SourceTile with_plain_scales(const Span& tile, const Source& in, ScaleLayout layout,
                                    TileCodes& codes) {
  if (layout == ScaleLayout::kPlain) return {tile, in};
  SourceTile own{{0, 0, tile.rows, tile.cols}, in};
  const bool rowwise = in.form == Form::kRowwise, swizzled = layout == ScaleLayout::kSwizzled;
  if (swizzled) own.in.block = rowwise ? Block{1, kMxBlock} : Block{kMxBlock, 1};
  const int outer_block = outer_of(own.in.block, in.form), k_block = k_of(own.in.block, in.form);
  const int64_t outer = rowwise ? tile.row : tile.col, k = rowwise ? tile.col : tile.row;
  const int lines = ceil_div(rowwise ? tile.rows : tile.cols, outer_block);
  const int blocks = ceil_div(rowwise ? tile.cols : tile.rows, k_block);
  const int64_t first_line = outer / outer_block, first_block = k / k_block;
  e8m0* to = codes.code;
  for (int i = 0; i < lines; ++i)
    for (int j = 0; j < blocks; ++j) {
      const int64_t line = first_line + i, block = first_block + j;
      *to++ = in.scale[swizzled
                           ? swizzled_index(line, block, in.place.scale_stride)
                           : quad_index(line, in.place.first_block + block, in.place.scale_stride)];
    }
  own.in.qdata += outer * in.place.qdata_stride + k;
  own.in.scale = codes.code;
  own.in.place.scale_stride = blocks;
  return own;
}

}  // namespace moxie::cpu
