// Shared memory of requantize's kernel, and loading a tile and its scales into registers.
#pragma once

#include <cuda.h>
#include <cuda_pipeline.h>

#include "moxie/core/copy_rows/row_side.cuh"
#include "moxie/core/quantize/quantize_kernel.cuh"
#include "moxie/core/tile/group_search.cuh"
#include "moxie/core/tile/raster.cuh"

namespace moxie::cuda {

// The longest run, in tiles. 8 tiles have 32 plain scales per row, one sector of memory, which is
// then read once.
inline constexpr int kRun = 8;
inline constexpr int kStages = 2;  // tiles in flight
inline constexpr int kCtas = 3;    // per SM: limited by registers
inline constexpr int kWarpCols = 64;
inline constexpr int kWarpFragments = kWarpCols / kFragment;  // fragments of a warp along a row
inline constexpr int kRowBlocks = kTileRows / kMxBlock;       // of a tile; two warps share one
inline constexpr int kColBlocks = kTileCols / kMxBlock;       // of a tile
inline constexpr int kRunBlocks = kRun * kColBlocks;
static_assert(kWarps == kRowBlocks * (kTileCols / kWarpCols));

__device__ inline int my_row() {
  return warp_index() / 2 * kMxBlock + lane_index() / kWarpFragments * kFragment;
}
__device__ inline int my_col() {
  return warp_index() % 2 * kWarpCols + lane_index() % kWarpFragments * kFragment;
}

// A tile as TMA delivers it. Half a warp reads 64 bytes in each of two rows that are eight apart,
// which conflict in the banks. Another pitch would avoid that, but TMA allows only multiples of 128
// bytes.
struct alignas(128) RowStage {
  uint8_t byte[kTileRows][kTileCols];
};

// The transposed tile as TMA stores it. Columns are ordered by their number modulo 8 first, and the
// 16-byte chunks of a line are swizzled by an xor with the line. In this order both the writes of
// fragments and the reads of TMA are free of bank conflicts.
struct alignas(1024) TransposedTile {
  uint8_t byte[kFragment][kFragmentLanes][kTileRows];

  __device__ uint2& piece(int j) {  // eight bytes of column j of this thread's fragment
    const int lane = my_col() / kFragment, index = my_row() / kColwisePiece ^ lane % kLineChunks;
    return *reinterpret_cast<uint2*>(byte[j][lane] + index * kColwisePiece +
                                     my_row() % kColwisePiece);
  }
  __device__ const uint4& chunk(int col, int index) const {
    const int lane = col / kFragment;
    return *reinterpret_cast<const uint4*>(byte[col % kFragment][lane] +
                                           (index ^ lane % kLineChunks) * kColwisePiece);
  }
};

// Number of runs in a row of tiles, and the tiles of each.
struct Runs {
  uint32_t count, length;
};

struct RequantizeParams {
  CUtensorMap qdata, transposed;
  Panels panels;
  const e8m0* scale;
  Block block;  // of the rowwise form
  ScaleLayout layout;
  int row_shift, col_shift;  // log2 of its sides
  FormParams<Form::kColwise> colwise;
  ScaleChoice choice;
  int64_t alignment, row_tiles;
  Runs runs;
  Ending ending;
  uint32_t ctas_at_once;
  RowSide apart;  // rows that do not lie together
};

struct RequantizeStorage {
  TransposedTile tile;
  RowStage stage[kStages];
  alignas(16) Amax<bf16> columns[kRowBlocks][kFragmentLanes];
  alignas(16) uint32_t block_amax[kColBlocks][kRowBlocks];  // of each 32 x 32
  alignas(8) uint8_t col_code[kRowBlocks][kTileCols];
  // One code per 32 columns of the run. The 4 bytes more put neighbouring rows into different
  // banks.
  alignas(16) uint8_t row_code[kTileRows][kRunBlocks + 4];
  alignas(8) uint64_t arrived[kStages];
  Place rowwise, colwise;
  int32_t x, y;                     // the panel's coordinates in the transposed tensor map
  const std::byte* row[kTileRows];  // rows that lie apart
  RowTileSearch search;
};
static_assert(sizeof(RequantizeStorage) <= ptx::kLeastShared);

// Loads the scales of the run, plain or quads, with two threads per row.
__device__ inline void load_plain_codes(const RequantizeParams& p, RequantizeStorage& s,
                                        const RowTile& at, int64_t col, int cols, int rows) {
  constexpr int kWords = kRun / 2;  // of four scales
  const int row = static_cast<int>(threadIdx.x / 2u), first = threadIdx.x % 2 * kWords;
  const int64_t block = (at.row + row) >> p.row_shift,
                first_k = (col >> p.col_shift) + (first * kTileCols >> p.col_shift);
  const e8m0* from = p.scale + scale_index(s.rowwise, p.layout, block, first_k);
  const int left = row < rows ? cols - first * kTileCols : 0;
  uint32_t word[kWords] = {};
  if (p.layout == ScaleLayout::kQuads) {
    const bool whole = first_k % kQuad == 0;  // always true for runs of four tiles
    const uint32_t quad = whole && left > 0 ? *reinterpret_cast<const uint32_t*>(from) : 0;
#pragma unroll
    for (int k = 0; k < kWords; ++k)
      if (k * kTileCols < left) {
        const uint32_t code =
            whole ? (quad >> (8 * k)) & 0xff
                  : p.scale[scale_index(s.rowwise, p.layout, block, first_k + k)].code;
        word[k] = code * 0x01010101u;
      }
  } else if (p.col_shift != kMxShift) {
#pragma unroll
    for (int k = 0; k < kWords; ++k)
      if (k * kTileCols < left) word[k] = from[k].code * 0x01010101u;
  } else if (left >= kWords * kTileCols && reinterpret_cast<uintptr_t>(from) % sizeof(uint4) == 0) {
    const uint4 four = *reinterpret_cast<const uint4*>(from);
    word[0] = four.x;
    word[1] = four.y;
    word[2] = four.z;
    word[3] = four.w;
  } else {
#pragma unroll
    for (int k = 0; k < kWords * kColBlocks; ++k)
      if (k * kMxBlock < left) word[k / 4] |= static_cast<uint32_t>(from[k].code) << (8 * (k % 4));
  }
#pragma unroll
  for (int k = 0; k < kWords; ++k)
    reinterpret_cast<uint32_t*>(s.row_code[row])[first + k] = word[k];
}
static_assert(kRun / 2 == kQuad && kTileCols == kQuadBlock);
static_assert(kTileRows * 2 == kThreads && kRun / 2 * sizeof(uint32_t) == sizeof(uint4));

// Loads swizzled scales with one warp per tile; 16 bytes hold the scales of four rows. The whole
// tile can be read, but scales outside the panel are undefined and masked.
__device__ inline void load_swizzled_codes(const RequantizeParams& p, RequantizeStorage& s,
                                           const RowTile& at, int64_t col, int cols, int rows) {
  constexpr int kBands = sizeof(uint4) / sizeof(uint32_t), kBand = kTileRows / kBands;
  const int tile = warp_index(), left = cols - tile * kTileCols;
  if (left <= 0) return;
  const e8m0* from = p.scale + s.rowwise.scale + tile * kScaleTileBytes +
                     swizzled_index(at.row, col / kMxBlock, s.rowwise.scale_stride);
  const uint4 four = reinterpret_cast<const uint4*>(from)[lane_index()];
  const uint32_t word[kBands] = {four.x, four.y, four.z, four.w};
  const int outside = max(kColBlocks - ceil_div(left, kMxBlock), 0);
#pragma unroll
  for (int band = 0; band < kBands; ++band) {
    const int row = band * kBand + lane_index();
    reinterpret_cast<uint32_t*>(s.row_code[row])[tile] =
        row < rows ? word[band] & (~0u >> (8 * outside)) : 0;
  }
}
static_assert(kWarps >= kRun && kTileRows / 4 == kWarp && kColBlocks == kScaleTileCols);

// Where the rows of the tile are, if they lie apart. A row outside the buffer counts as the bytes
// at its begin.
__device__ inline void find_rows(const RequantizeParams& p, RequantizeStorage& s, const RowTile& at,
                                 int rows) {
  const int row = static_cast<int>(threadIdx.x);
  if (row >= rows) return;
  const int64_t begin = p.apart.begin_of(at.panel.begin + at.row + row);
  s.row[row] = p.apart.data + (begin <= p.apart.bytes - p.panels.cols ? max<int64_t>(begin, 0) : 0);
}

// Starts to copy this thread's fragment of a tile whose rows lie apart. Each thread reads only what
// it copied itself, so that this needs no barrier.
__device__ inline void stage_fragment(RequantizeStorage& s, int64_t col, int cols, int index,
                                      int rows) {
  const int left = min(rows - my_row(), kFragment);
  const bool inside = index * kTileCols + my_col() < cols;
#pragma unroll
  for (int i = 0; i < kFragment; ++i) {
    uint8_t* const to = &s.stage[index % kStages].byte[my_row() + i][my_col()];
    if (i < left && inside)
      __pipeline_memcpy_async(to, s.row[my_row() + i] + col + index * kTileCols + my_col(),
                              sizeof(uint2));
    else
      *reinterpret_cast<uint2*>(to) = {};
  }
}

// Loads this thread's fragment of tile `index` of the run.
__device__ inline void load_fragment(RequantizeStorage& s, int stage, int index, int rows,
                                     Fragment<e4m3>& fragment) {
#pragma unroll
  for (int i = 0; i < kFragment; ++i) {
    const uint2 two = *reinterpret_cast<const uint2*>(&s.stage[stage].byte[my_row() + i][my_col()]);
    fragment.word[i][0] = two.x;
    fragment.word[i][1] = two.y;
  }
  const uint8_t* codes = &s.row_code[my_row()][index * kColBlocks + my_col() / kMxBlock];
#pragma unroll
  for (int i = 0; i < kFragment / 2; ++i)
    fragment.code[i] =
        codes[2 * i * sizeof(s.row_code[0])] | codes[(2 * i + 1) * sizeof(s.row_code[0])] << 16;
  if (rows < kTileRows) {  // the rows below belong to another group
#pragma unroll
    for (int i = 0; i < kFragment; ++i)
      if (my_row() + i >= rows) fragment.word[i][0] = fragment.word[i][1] = 0;
  }
}

}  // namespace moxie::cuda
