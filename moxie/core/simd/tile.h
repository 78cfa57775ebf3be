// What kernels of the cpu backend work on. Tensors are cut into tiles that stay in a core's cache
// while one pass after another reads them: x comes from memory once, however many forms are made.
#pragma once

#include <cstdint>
#include <memory>

#include "moxie/core/format/block.h"
#include "moxie/core/format/e4m3.h"
#include "moxie/core/format/e8m0.h"
#include "moxie/core/layout/panel.h"

namespace moxie::cpu {

// Blocks are 1, 32 or 128 wide and tall, so tiles that begin at multiples of 128 cut none. 512
// columns: of 128 to 2048, 256 and 512 were the fastest for both forms (bf16 and f32, on a core
// with 2 MiB of L2; 512 is 54 % of a copy's bandwidth, 128 was 29 %, 2048 49 %).
inline constexpr int kTileRows = 128;
inline constexpr int kTileCols = 512;
// Kernels see columns in multiples of this: the last ones of a tensor are copied beside zeros.
inline constexpr int kTileEdge = 128;
// Where no result is transposed, tiles are longer rows, and fewer.
inline constexpr int kRowTileRows = 16;
inline constexpr int kRowTileCols = 8192;
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
  // What the thread reads next, in rows as far apart: asked for while this tile is worked on, since
  // rows of a tile are too short for the hardware to see them coming. May be null.
  const T* next;
  int64_t next_stride;
};

// The part of a row of the next tile that is asked for while a row of this one is encoded.
struct Ahead {
  const void* from;
  int lines;  // cache lines per 64 elements
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
  const e8m0* scale;     // that of its block; kernels take plain ones
  Place place;
};

// What a thread needs beside the tensors. Strides that are odd multiples of a cache line keep rows
// of a tile out of each other's cache sets.
struct Scratch {
  static constexpr int kQStride = kTileCols + 64;
  static constexpr int kTStride = kTileRows + 64;
  static constexpr int kTCols = 64;
  alignas(64) uint8_t q[kTileRows * kQStride];       // the tile, quantized
  alignas(64) uint8_t t[kTCols * kTStride];          // some of its columns, transposed
  alignas(64) int32_t amax[kTileCols];               // by column, or by block of some rows
  alignas(64) float inverse[kTileCols];              // the same
  alignas(64) uint8_t code[kBlocksDown][kTileCols];  // scales by block row and column
  std::unique_ptr<uint8_t[]> edge;                   // x, where it lacks columns
};

}  // namespace moxie::cpu
