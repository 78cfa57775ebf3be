// What kernels of the cpu backend work on. Tensors are cut into tiles that stay in a core's cache
// while one pass after another reads them: x comes from memory once, however many forms are made.
#pragma once

#include <cstdint>

#include "moxie/core/format/block.h"
#include "moxie/core/format/e4m3.h"
#include "moxie/core/format/e8m0.h"
#include "moxie/core/layout/panel.h"

namespace moxie::cpu {

// Blocks are 1, 32 or 128 wide and tall, so tiles that begin at multiples of 128 cut none.
// The sides are how many bytes in a row a tile writes to the colwise and to the rowwise result, and
// reads of x (twice the columns): memory wants them long, the tile has to stay in a core's 2 MB of
// L2, and its rows of the colwise result in the TLB. Swept at 8192 x 5120 bf16, two threads, best
// of 15, GB/s colwise / both: 256 x 512 10.6 / 6.8, 256 x 1024 10.2 / 9.0, 256 x 2048 13.3 / 7.6,
// 512 x 512 12.5 / 6.2, 512 x 1024 14.1 / 8.7.
inline constexpr int kTileRows = 512;
inline constexpr int kTileCols = 1024;
// Kernels see columns in multiples of this: the last ones of a tensor are copied beside zeros.
inline constexpr int kTileEdge = 128;
// Rows quantized on their own need no transpose, and run on for longer.
inline constexpr int kRowCols = 8192;
// Results of this many bytes or more bypass the caches.
inline constexpr int64_t kStreamBytes = 16 << 20;
inline constexpr int kBlocksDown = kTileRows / kMxBlock;

// Part of one panel of x.
struct Span {
  int64_t row, col;  // where it begins in its panel; multiples of the block
  int rows, cols;
};

template <class T>
struct Tile : Span {
  const T* x;      // readable up to the next multiple of kTileEdge columns
  int64_t stride;  // elements from one row to the next
};

// One form of a result, and where the tile's panel lands in it.
struct Target {
  Form form;
  Block block;
  ScaleLayout layout;
  e4m3* qdata;
  e8m0* scale;
  bool stream;  // past the caches: the result is larger than they are
  Place place;
};

// An operand that is read, and where the tile's panel lies in it.
struct Source {
  Form form;
  Block block;
  const uint8_t* qdata;  // element (0, 0) of the panel
  const e8m0* scale;     // plain; that of its block
  Place place;
};

// What a thread needs beside the tensors. Strides that are odd multiples of a cache line keep rows
// of a tile out of each other's cache sets.
struct Scratch {
  static constexpr int kQStride = kTileCols + 64;
  static constexpr int kTStride = kTileRows + 64;
  alignas(64) uint8_t q[kTileRows * kQStride];          // the tile, quantized
  alignas(64) uint8_t t[64 * kTStride];                 // 64 of its columns, transposed
  alignas(64) uint8_t edge[kTileRows * kTileEdge * 4];  // x, where it lacks columns
  alignas(64) uint8_t row[kRowCols];                    // one row, quantized on its own
  alignas(64) uint8_t row_code[kRowCols / kMxBlock];
  alignas(64) int32_t amax[kTileCols];  // by column; of rows alone, by block
  alignas(64) float inverse[kTileCols];
  alignas(64) uint8_t code[kBlocksDown][kTileCols];  // scales by block row and column
};

}  // namespace moxie::cpu
