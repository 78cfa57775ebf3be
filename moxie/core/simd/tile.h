// Tiles of the cpu backend. A tile stays in a core's cache while several passes read it, so that x
// is read from memory once for any number of forms.
#pragma once

#include <cstdint>
#include <memory>

#include "moxie/core/format/block.h"
#include "moxie/core/format/e4m3.h"
#include "moxie/core/format/e8m0.h"
#include "moxie/core/layout/panel.h"

namespace moxie::cpu {

// The sides of blocks are 1, 32 or 128, so tiles at multiples of 128 cut no block. 512 columns: of
// 128 to 2048, 256 and 512 were the fastest for both forms (bf16 and f32, on a core with 2 MiB of
// L2; 512 columns reach 54 % of a copy's bandwidth, 128 reach 29 %, 2048 reach 49 %).
static_assert(sides_are<1, 32, 128>());
inline constexpr int kTileRows = 128;
inline constexpr int kTileCols = 512;
// Kernels process multiples of this many columns; the last columns of a tensor are copied and
// padded with zeros.
inline constexpr int kTileEdge = 128;
// The sides of tiles if no result is transposed: fewer and longer rows.
inline constexpr int kRowTileRows = 16;
inline constexpr int kRowTileCols = 8192;
// Results of at least this many bytes bypass the caches: they would not fit anyway.
inline constexpr int64_t kStreamBytes = 16 << 20;
inline constexpr int kBlocksDown = kTileRows / kMxBlock;

// Part of one panel of x.
struct Span {
  int64_t row, col;  // first element, relative to the panel; multiples of the block
  int rows, cols;
};

template <class T>
struct Tile : Span {
  const T* x;      // readable up to the next multiple of kTileEdge columns
  int64_t stride;  // elements from one row to the next
  // The tile that this thread reads next, to prefetch: rows of a tile are too short for the
  // hardware prefetcher. May be null.
  const T* next;
  int64_t next_stride;
};

// The part of the next tile to prefetch while a row of this one is encoded.
struct Ahead {
  const void* from;
  int lines;  // cache lines per 64 elements
};

// One form of a result, and the place of the tile's panel in it.
struct Target {
  Form form;
  Block block;
  ScaleLayout layout;
  e4m3* qdata;
  e8m0* scale;
  bool stream;  // bypass the caches (kStreamBytes)
  Place place;
};

// An operand that is read, and the place of the tile's panel in it.
struct Source {
  Form form;
  Block block;
  const uint8_t* qdata;  // element (0, 0) of the panel
  const e8m0* scale;     // scale of the panel's first block; plain
  Place place;
};

// Buffers of a thread. Strides are odd multiples of a cache line, so that rows of a tile map to
// different cache sets.
struct Scratch {
  static constexpr int kQStride = kTileCols + 64;
  static constexpr int kTStride = kTileRows + 64;
  static constexpr int kTCols = 64;
  alignas(64) uint8_t q[kTileRows * kQStride];       // the tile, quantized
  alignas(64) uint8_t t[kTCols * kTStride];          // some of its columns, transposed
  alignas(64) int32_t amax[kTileCols];               // by column, or by block of several rows
  alignas(64) float inverse[kTileCols];              // inverse scales, in the order of amax
  alignas(64) uint8_t code[kBlocksDown][kTileCols];  // scales by block row and column
  std::unique_ptr<uint8_t[]> edge;                   // x padded with zero columns (with_edge)
};

}  // namespace moxie::cpu
