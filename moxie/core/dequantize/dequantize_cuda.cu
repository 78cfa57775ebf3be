#include "moxie/core/dequantize/backends.h"
#include "moxie/core/layout/tile.cuh"

namespace moxie::cuda {
namespace {

template <class T>
struct DequantizeParams {
  Panels panels;
  Block block;
  RowwiseSource source;  // rowwise
  const e4m3* qdata_t;   // colwise
  const e8m0* scale_t;
  BlockGrid grid;
  bool chunked_t;
  T* x;
  bool chunked;
  int64_t alignment, col_tiles, tiles;
};

struct DequantizeStorage {
  TileBuffer<E4m3Word> tile;  // colwise only: in the order of x
  RowTileSearch search;
};

// Word i gets byte i of each word.
__device__ void transpose(E4m3Word (&word)[kChunk]) {
  const uint32_t a = __byte_perm(word[0], word[1], 0x5140),
                 b = __byte_perm(word[2], word[3], 0x5140);
  const uint32_t c = __byte_perm(word[0], word[1], 0x7362),
                 d = __byte_perm(word[2], word[3], 0x7362);
  word[0] = __byte_perm(a, b, 0x5410);
  word[1] = __byte_perm(a, b, 0x7632);
  word[2] = __byte_perm(c, d, 0x5410);
  word[3] = __byte_perm(c, d, 0x7632);
}

// Reads along the contraction, four columns a warp at a time, and leaves the tile in x's order.
template <class T>
__device__ void load_colwise(const DequantizeParams<T>& p, const Place& place, const TileSpan& span,
                             TileBuffer<E4m3Word>& tile) {
  const int row = lane_index() * kChunk;
  for (int index = warp_index(); index * kChunk < span.cols; index += kWarps) {
    E4m3Word word[kChunk] = {};
#pragma unroll
    for (int j = 0; j < kChunk; ++j) {
      const int col = index * kChunk + j;
      if (col < span.cols)
        word[j] = load_word(
            p.qdata_t + place.qdata + (span.col + col) * place.qdata_stride + span.row + row,
            span.rows - row, p.chunked_t);
    }
    transpose(word);
#pragma unroll
    for (int i = 0; i < kChunk; ++i) tile.at(row + i, index) = word[i];
  }
}

template <class T>
__device__ void dequantize_colwise(const DequantizeParams<T>& p, const Panel& panel,
                                   const TileSpan& span, TileBuffer<E4m3Word>& tile) {
  const Place place = place_of(p.panels, panel, Form::kColwise, p.block, ScaleLayout::kPlain);
  load_colwise(p, place, span, tile);
  __syncthreads();

  const int lane = lane_index(), col = lane * kChunk, first = warp_index() * kWarpRows;
  if (first >= span.rows) return;
  // The 16 rows of a warp are inside one block, as a colwise block has 32 rows or more.
  Chunk<e8m0> code{};
#pragma unroll
  for (int j = 0; j < kChunk; ++j) {
    const int64_t outer = (span.col + col + j) >> p.grid.col_shift,
                  k = (span.row + first) >> p.grid.row_shift;
    if (col + j < span.cols)
      code.value[j] = p.scale_t[place.scale + outer * place.scale_stride + k];
  }
  T* x = p.x + (panel.begin + span.row) * p.panels.cols + span.col + col;
  for (int row = first; row < min(first + kWarpRows, span.rows); ++row)
    store_chunk(x + row * p.panels.cols,
                from_floats<T>(RowwiseSource::scaled(tile.at(row, lane), code)), span.cols - col,
                p.chunked);
}

template <class T, Form kForm>
__global__ __launch_bounds__(kThreads) void dequantize_kernel(
    const __grid_constant__ DequantizeParams<T> p) {
  __shared__ DequantizeStorage s;
  const int64_t tile = work_index();
  if (tile >= p.tiles) return;
  const RowTile& at = find_row_tile(p.panels, p.alignment, tile / p.col_tiles, s.search);
  const int64_t col = tile % p.col_tiles * kTileCols;
  const int64_t rows = at.tail ? p.panels.rows - at.panel.begin : at.panel.rows;
  const TileSpan span{.row = at.row,
                      .col = col,
                      .rows = clip(rows - at.row, kTileRows),
                      .cols = clip(p.panels.cols - col, kTileCols)};
  const int lane_col = lane_index() * kChunk;
  T* x = p.x + (at.panel.begin + span.row) * p.panels.cols + col + lane_col;
  if (at.tail) {
    for (int row = warp_index(); row < span.rows; row += kWarps)
      store_chunk(x + row * p.panels.cols, Chunk<T>{}, span.cols - lane_col, p.chunked);
  } else if constexpr (kForm == Form::kRowwise) {
    sweep(p.source.in_panel(p.panels, at.panel), span, [&](int row, const Chunk<float>& chunk) {
      if (row < span.rows)
        store_chunk(x + row * p.panels.cols, from_floats<T>(chunk), span.cols - lane_col,
                    p.chunked);
    });
  } else {
    dequantize_colwise(p, at.panel, span, s.tile);
  }
}

}  // namespace

void dequantize(const DequantizeArgs& args, const Panels& panels, void* stream) {
  const bool rowwise = args.form == Form::kRowwise;
  const int64_t alignment = rowwise ? 1 : args.block.rows;
  const int64_t col_tiles = ceil_div<int64_t>(panels.cols, kTileCols);
  const int64_t tiles = num_row_tiles(panels, alignment, panels.rows) * col_tiles;
  const Launch how{.op = "dequantize", .stream = stream, .work = tiles};
  with_format(args.x.format, [&]<class T>() {
    auto* x = static_cast<T*>(args.x.data);
    const DequantizeParams<T> params{
        .panels = panels,
        .block = args.block,
        .source = rowwise_source(args.qdata.data, args.scale.data, args.block, panels.cols),
        .qdata_t = args.qdata.data,
        .scale_t = args.scale.data,
        .grid = grid_of(args.block),
        .chunked_t = is_chunked(args.qdata.data, args.qdata.dim(-1)),
        .x = x,
        .chunked = is_chunked(x, panels.cols),
        .alignment = alignment,
        .col_tiles = col_tiles,
        .tiles = tiles};
    if (rowwise)
      launch(how, dequantize_kernel<T, Form::kRowwise>, params);
    else
      launch(how, dequantize_kernel<T, Form::kColwise>, params);
  });
}

}  // namespace moxie::cuda
