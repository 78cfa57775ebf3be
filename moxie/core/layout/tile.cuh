// A tile is 128 x 128 elements of one panel, what a CTA works on: both sides of the largest block,
// and rows of 128 bytes in either form. A warp takes 16 rows of it, a lane four columns of those.
#pragma once

#include <bit>

#include "moxie/core/base/view.h"
#include "moxie/core/format/e4m3.cuh"
#include "moxie/core/layout/panel.cuh"

namespace moxie::cuda {

inline constexpr int kTileCols = 128;
inline constexpr int kTileChunks = kTileCols / kChunk;
inline constexpr int kWarpRows = kTileRows / kWarps;
static_assert(kTileChunks == kWarp, "a warp reads one row of a tile at a time");

// Elements of a tile that are inside the panel, and where its first one is.
struct TileSpan {
  int64_t row, col;  // counted from the panel's first
  int rows, cols;    // at most 128 each
};

constexpr int clip(int64_t left, int limit) {
  return static_cast<int>(max<int64_t>(min<int64_t>(left, limit), 0));
}

// The blocks of a tile, numbered row by row.
struct BlockGrid {
  int row_shift, col_shift;  // log2 of a block's sides

  constexpr int index(int row, int col) const {
    return (row >> row_shift) * (kTileCols >> col_shift) + (col >> col_shift);
  }
  constexpr int rows() const { return kTileRows >> row_shift; }
  constexpr int cols() const { return kTileCols >> col_shift; }
  constexpr int count() const { return rows() * cols(); }
};

// A block is at most a tile and, to be of use to a GEMM, at least 32 long.
inline constexpr int kMaxBlocks = kTileRows * kTileCols / kMxBlock;

constexpr BlockGrid grid_of(Block block) {
  return {std::countr_zero(static_cast<unsigned>(block.rows)),
          std::countr_zero(static_cast<unsigned>(block.cols))};
}

// ---- global memory ----

// Rows of `stride` elements can be moved in chunks when every row starts on a chunk's boundary.
template <class T>
bool is_chunked(const T* data, int64_t stride) {
  return reinterpret_cast<uintptr_t>(data) % (kChunk * sizeof(T)) == 0 && stride % kChunk == 0;
}

template <class T>
__device__ Chunk<T> load_chunk(const T* from, int64_t count, bool chunked) {
  if (chunked && count >= kChunk) return *reinterpret_cast<const Chunk<T>*>(from);
  Chunk<T> chunk{};
#pragma unroll
  for (int i = 0; i < kChunk; ++i)
    if (i < count) chunk.value[i] = from[i];
  return chunk;
}

template <class T>
__device__ void store_chunk(T* to, const Chunk<T>& chunk, int64_t count, bool chunked) {
  if (chunked && count >= kChunk) {
    *reinterpret_cast<Chunk<T>*>(to) = chunk;
    return;
  }
#pragma unroll
  for (int i = 0; i < kChunk; ++i)
    if (i < count) to[i] = chunk.value[i];
}

__device__ inline E4m3Word load_word(const e4m3* from, int64_t count, bool chunked) {
  if (chunked && count >= kChunk) return *reinterpret_cast<const E4m3Word*>(from);
  E4m3Word word = 0;
#pragma unroll
  for (int i = 0; i < kChunk; ++i)
    if (i < count) word |= static_cast<E4m3Word>(from[i].bits) << 8 * i;
  return word;
}

__device__ inline void store_word(e4m3* to, E4m3Word word, int64_t count, bool chunked) {
  if (chunked && count >= kChunk) {
    *reinterpret_cast<E4m3Word*>(to) = word;
    return;
  }
#pragma unroll
  for (int i = 0; i < kChunk; ++i)
    if (i < count) to[i] = {static_cast<uint8_t>(word >> 8 * i)};
}

template <class F>
void with_format(Format format, F&& f) {
  switch (format) {
    case Format::kBf16: return f.template operator()<bf16>();
    case Format::kF32: return f.template operator()<float>();
  }
}

// ---- sources: where elements come from, in the order of x ----

template <class T>
struct FloatSource {
  using Element = T;
  const T* x;  // element (0, 0) of the panel once in_panel() was called
  int64_t cols;
  bool chunked;

  __device__ FloatSource in_panel(const Panels&, const Panel& panel) const {
    return {x + panel.begin * cols, cols, chunked};
  }
  __device__ Chunk<T> load(int64_t row, int64_t col, int64_t count) const {
    return load_chunk(x + row * cols + col, count, chunked);
  }
};

template <class T>
FloatSource<T> float_source(const void* x, int64_t cols) {
  const auto* data = static_cast<const T*>(x);
  return {data, cols, is_chunked(data, cols)};
}

// The rowwise form, with plain scales.
struct RowwiseSource {
  using Element = float;
  const e4m3* qdata;
  const e8m0* scale;
  Block block;
  BlockGrid grid;
  int64_t cols, scale_stride;
  bool chunked;

  __device__ RowwiseSource in_panel(const Panels& panels, const Panel& panel) const {
    const Place place = place_of(panels, panel, Form::kRowwise, block, ScaleLayout::kPlain);
    return {
        qdata + place.qdata, scale + place.scale, block, grid, cols, place.scale_stride, chunked};
  }
  __device__ Chunk<float> load(int64_t row, int64_t col, int64_t count) const {
    if (count <= 0) return {};
    const E4m3Word word = load_word(qdata + row * cols + col, count, chunked);
    // A chunk is inside one block: columns of a rowwise block are 32 or more.
    const e8m0 code = scale[(row >> grid.row_shift) * scale_stride + (col >> grid.col_shift)];
    return scaled(word, {code, code, code, code});
  }

  // qdata * scale, with the one NaN of the format: the GPU's own has other bits.
  __device__ static Chunk<float> scaled(E4m3Word word, const Chunk<e8m0>& code) {
    Chunk<float> out = decode(word);
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      const float value = out.value[i] * to_float(code.value[i]);
      out.value[i] = value == value ? value : to_float(e4m3{kE4m3Nan});
    }
    return out;
  }
};

inline RowwiseSource rowwise_source(const e4m3* qdata, const e8m0* scale, Block block,
                                    int64_t cols) {
  return {.qdata = qdata,
          .scale = scale,
          .block = block,
          .grid = grid_of(block),
          .cols = cols,
          .scale_stride = 0,
          .chunked = is_chunked(qdata, cols)};
}

// Calls visit(row, chunk) for the rows of this warp and the columns of this lane. Elements outside
// the span are 0. All lanes call visit together, so it may use shuffles.
template <class Source, class Visit>
__device__ void sweep(const Source& source, const TileSpan& span, Visit&& visit) {
  constexpr int kInFlight = 4;  // loads before the first use: 1 KB per warp for bf16
  const int col = lane_index() * kChunk;
  const int first = warp_index() * kWarpRows;
  for (int batch = first; batch < first + kWarpRows; batch += kInFlight) {
    Chunk<typename Source::Element> chunk[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      chunk[i] = {};
      if (batch + i < span.rows)
        chunk[i] = source.load(span.row + batch + i, span.col + col, span.cols - col);
    }
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) visit(batch + i, chunk[i]);
  }
}

// ---- shared memory ----

template <class T>
struct TileBuffer {
  T chunk[kTileRows][kTileChunks];

  // Four rows apart, the same column is in another bank: neither a row's chunks nor those of one
  // column over every fourth row meet in a bank. Padding rows instead would misalign the chunks.
  __device__ T& at(int row, int index) { return chunk[row][index ^ (row / kChunk)]; }
  __device__ const T& at(int row, int index) const { return chunk[row][index ^ (row / kChunk)]; }
};

// Magnitudes as bits: they order like integers, and NaN is the largest.
using Magnitudes = Chunk<uint32_t>;

template <class T>
__device__ Magnitudes magnitudes(const Chunk<T>& chunk) {
  const Chunk<float> x = to_floats(chunk);
  Magnitudes out;
#pragma unroll
  for (int i = 0; i < kChunk; ++i) out.value[i] = std::bit_cast<uint32_t>(x.value[i]) & 0x7fffffff;
  return out;
}

__device__ inline void raise(Magnitudes& most, const Magnitudes& by) {
#pragma unroll
  for (int i = 0; i < kChunk; ++i) most.value[i] = max(most.value[i], by.value[i]);
}

// Adds what the lanes of a warp found in `row` (or in rows of the same block) to the blocks' amax.
__device__ inline void add_amax(uint32_t* amax, BlockGrid grid, int row, const Magnitudes& most) {
  const int col = lane_index() * kChunk;
  if (grid.col_shift == 0) {
#pragma unroll
    for (int i = 0; i < kChunk; ++i) atomicMax(&amax[grid.index(row, col + i)], most.value[i]);
    return;
  }
  uint32_t all = max(max(most.value[0], most.value[1]), max(most.value[2], most.value[3]));
  constexpr int kLanes = kMxBlock / kChunk;  // no block with columns to share has fewer
  for (int step = 1; step < kLanes; step *= 2) all = max(all, __shfl_xor_sync(~0u, all, step));
  if (lane_index() % kLanes == 0) atomicMax(&amax[grid.index(row, col)], all);
}

// ---- operands: where a tile goes ----

// One form of the tile: [outer, k] with k contiguous.
struct TileOperand {
  e4m3* qdata;  // element (0, 0) of the tile
  int64_t stride;
  bool chunked;
  int outer, k;  // at most 128 each; k includes the zeros that pad a group's tail
};

// The parts of an operand that no group covers.
__device__ inline void zero(const TileOperand& out) {
  const int k = lane_index() * kChunk;
  for (int i = warp_index(); i < out.outer; i += kWarps)
    store_word(out.qdata + i * out.stride + k, 0, out.k - k, out.chunked);
}

// inverse: of each block's scale, by grid.index().
template <class T>
__device__ void store_rowwise(const TileOperand& out, const TileBuffer<Chunk<T>>& tile,
                              BlockGrid grid, const float* inverse) {
  const int lane = lane_index(), col = lane * kChunk;
  const int first = warp_index() * kWarpRows;
#pragma unroll 4
  for (int row = first; row < min(first + kWarpRows, out.outer); ++row) {
    const E4m3Word word = encode(to_floats(tile.at(row, lane)), inverse[grid.index(row, col)]);
    store_word(out.qdata + row * out.stride + col, word, out.k - col, out.chunked);
  }
}

// rows: those of the span; from there to out.k the operand is padded with zeros.
template <class T>
__device__ void store_colwise(const TileOperand& out, const TileBuffer<Chunk<T>>& tile,
                              BlockGrid grid, const float* inverse, int rows) {
  const int row = lane_index() * kChunk;
  const int valid = clip(rows - row, kChunk);
  const E4m3Word keep = valid == kChunk ? ~0u : (1u << 8 * valid) - 1;
  for (int index = warp_index(); index * kChunk < out.outer; index += kWarps) {
    Chunk<float> x[kChunk];
#pragma unroll
    for (int i = 0; i < kChunk; ++i) x[i] = to_floats(tile.at(row + i, index));
#pragma unroll
    for (int j = 0; j < kChunk; ++j) {
      const int col = index * kChunk + j;
      if (col >= out.outer) break;
      const Chunk<float> line{x[0].value[j], x[1].value[j], x[2].value[j], x[3].value[j]};
      // Four rows are inside one block: rows of a colwise block are 32 or more.
      const E4m3Word word = encode(line, inverse[grid.index(row, col)]) & keep;
      store_word(out.qdata + col * out.stride + row, word, out.k - row, out.chunked);
    }
  }
}

}  // namespace moxie::cuda
