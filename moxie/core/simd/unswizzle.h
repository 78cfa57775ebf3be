// Kernels read plain scales. Swizzled ones are plain ones of 1 x 32 blocks in another order, so
// those of a tile are put in order first: then it is a small operand of its own.
#pragma once

#include "moxie/core/simd/tile.h"

namespace moxie::cpu {

struct TileCodes {
  static constexpr int kOfTile = kTileRows * kTileCols, kOfRowTile = kRowTileRows * kRowTileCols;
  e8m0 code[max(kOfTile, kOfRowTile) / kMxBlock];
};

struct SourceTile {
  Span span;  // of `in`
  Source in;
};

// in.place is that of swizzled scales. What is returned lasts as long as `codes`.
inline SourceTile unswizzled(const Span& tile, const Source& in, TileCodes& codes) {
  const bool rowwise = in.form == Form::kRowwise;
  const int64_t outer = rowwise ? tile.row : tile.col, k = rowwise ? tile.col : tile.row;
  const int lines = rowwise ? tile.rows : tile.cols;
  const int blocks = ceil_div(rowwise ? tile.cols : tile.rows, kMxBlock);
  e8m0* to = codes.code;
  for (int i = 0; i < lines; ++i)
    for (int j = 0; j < blocks; ++j)
      *to++ = in.scale[swizzled_index(outer + i, k / kMxBlock + j, in.place.scale_stride)];
  SourceTile own{{0, 0, tile.rows, tile.cols}, in};
  own.in.block = rowwise ? Block{1, kMxBlock} : Block{kMxBlock, 1};
  own.in.qdata += outer * in.place.qdata_stride + k;
  own.in.scale = codes.code;
  own.in.place.scale_stride = blocks;
  return own;
}

}  // namespace moxie::cpu
