// Three kernels: a scale spans a whole row, or a whole group, so it is known only when every CTA
// has looked at its tile. In between, the scale buffers hold the amax.
#include "moxie/core/layout/tile.cuh"
#include "moxie/core/row_scale/backends.h"

namespace moxie::cuda {
namespace {

// Inside a tile a scale covers one row, or one column.
constexpr BlockGrid kRowGrid = grid_of({1, kTileCols});
constexpr BlockGrid kColGrid = grid_of({kTileRows, 1});

struct ScaledForm {
  bool wanted = false;
  bool chunked = false;
  e4m3* qdata = nullptr;
  float* scale = nullptr;
};

template <class T>
struct RowScaleParams {
  Panels panels;
  FloatSource<T> source;
  ScaledForm rowwise, colwise;
  int64_t col_tiles, tiles;
};

struct AmaxStorage {
  uint32_t row[kTileRows], col[kTileCols];
  RowTileSearch search;
};

template <class T>
struct StoreStorage {
  TileBuffer<Chunk<T>> tile;
  float row[kTileRows], col[kTileCols];  // what elements are multiplied with
  RowTileSearch search;
};

__device__ TileSpan span_of(const RowTile& at, const Panels& panels, int64_t col) {
  return {.row = at.row,
          .col = col,
          .rows = clip(at.panel.rows - at.row, kTileRows),
          .cols = clip(panels.cols - col, kTileCols)};
}

// 0 is left to rows that no group covers and to empty groups. Instead of it, the smallest magnitude
// there is gives the same scale.
__device__ void raise_scale(float* scale, uint32_t amax) {
  atomicMax(reinterpret_cast<unsigned*>(scale), max(amax, 1u));
}

template <class T>
__global__ __launch_bounds__(kThreads) void amax_kernel(
    const __grid_constant__ RowScaleParams<T> p) {
  __shared__ AmaxStorage s;
  const int64_t tile = work_index();
  if (tile >= p.tiles) return;
  for (int i = threadIdx.x; i < kTileRows; i += kThreads) s.row[i] = 0;
  for (int i = threadIdx.x; i < kTileCols; i += kThreads) s.col[i] = 0;
  const RowTile& at = find_row_tile(p.panels, kRowScaleAlignment, tile / p.col_tiles, s.search);
  if (at.tail) return;
  const TileSpan span = span_of(at, p.panels, tile % p.col_tiles * kTileCols);
  Magnitudes most{};
  sweep(p.source.in_panel(p.panels, at.panel), span, [&](int row, const Chunk<T>& chunk) {
    const Magnitudes here = magnitudes(chunk);
    if (p.rowwise.wanted) add_amax(s.row, kRowGrid, row, here);
    raise(most, here);
  });
  if (p.colwise.wanted) add_amax(s.col, kColGrid, warp_index() * kWarpRows, most);
  __syncthreads();
  for (int i = threadIdx.x; i < span.rows && p.rowwise.wanted; i += kThreads)
    raise_scale(&p.rowwise.scale[at.panel.begin + span.row + i], s.row[i]);
  for (int i = threadIdx.x; i < span.cols && p.colwise.wanted; i += kThreads)
    raise_scale(&p.colwise.scale[at.panel.index * p.panels.cols + span.col + i], s.col[i]);
}

struct DecodeParams {
  float* scale;
  int64_t count;
};

__global__ __launch_bounds__(kThreads) void decode_kernel(const __grid_constant__ DecodeParams p) {
  const int64_t i = work_index() * kThreads + threadIdx.x;
  if (i < p.count && p.scale[i] != 0.f) p.scale[i] = row_scale_of(p.scale[i]).decode;
}

// Both are powers of two, or NaN.
__device__ float encode_of(float decode) {
  if (decode != decode) return decode;
  return std::bit_cast<float>((254u << 23) - std::bit_cast<uint32_t>(decode));
}

// In the tail: what no group covers.
template <class T>
__device__ void zero_tail(const RowScaleParams<T>& p, const RowTile& at, int64_t col) {
  const int cols = clip(p.panels.cols - col, kTileCols);
  if (p.rowwise.wanted)
    zero({.qdata = p.rowwise.qdata + (at.panel.begin + at.row) * p.panels.cols + col,
          .stride = p.panels.cols,
          .chunked = p.rowwise.chunked,
          .outer = clip(p.panels.rows - at.panel.begin - at.row, kTileRows),
          .k = cols});
  if (p.colwise.wanted) {
    const RowScalePlace place = colwise_place(p.panels, at.panel);
    zero({.qdata = p.colwise.qdata + place.qdata + col * place.stride + at.row,
          .stride = place.stride,
          .chunked = p.colwise.chunked,
          .outer = cols,
          .k = clip(place.stride - at.panel.padded - at.row, kTileRows)});
  }
}

template <class T>
__global__ __launch_bounds__(kThreads) void store_kernel(
    const __grid_constant__ RowScaleParams<T> p) {
  const int64_t tile = work_index();
  if (tile >= p.tiles) return;
  auto& s = shared_storage<StoreStorage<T>>();
  const RowTile& at = find_row_tile(p.panels, kRowScaleAlignment, tile / p.col_tiles, s.search);
  const int64_t col = tile % p.col_tiles * kTileCols;
  if (at.tail) return zero_tail(p, at, col);

  const TileSpan span = span_of(at, p.panels, col);
  sweep(p.source.in_panel(p.panels, at.panel), span,
        [&](int row, const Chunk<T>& chunk) { s.tile.at(row, lane_index()) = chunk; });
  for (int i = threadIdx.x; i < span.rows && p.rowwise.wanted; i += kThreads)
    s.row[i] = encode_of(p.rowwise.scale[at.panel.begin + span.row + i]);
  for (int i = threadIdx.x; i < span.cols && p.colwise.wanted; i += kThreads)
    s.col[i] = encode_of(p.colwise.scale[at.panel.index * p.panels.cols + col + i]);
  __syncthreads();

  if (p.rowwise.wanted)
    store_rowwise({.qdata = p.rowwise.qdata + (at.panel.begin + span.row) * p.panels.cols + col,
                   .stride = p.panels.cols,
                   .chunked = p.rowwise.chunked,
                   .outer = span.rows,
                   .k = span.cols},
                  s.tile, kRowGrid, s.row);
  if (p.colwise.wanted) {
    const RowScalePlace place = colwise_place(p.panels, at.panel);
    const int64_t k =
        p.panels.weights ? at.panel.rows : round_up<int64_t>(at.panel.rows, kRowScaleAlignment);
    store_colwise({.qdata = p.colwise.qdata + place.qdata + col * place.stride + span.row,
                   .stride = place.stride,
                   .chunked = p.colwise.chunked,
                   .outer = span.cols,
                   .k = clip(k - span.row, kTileRows)},
                  s.tile, kColGrid, s.col, span.rows);
  }
}

ScaledForm form_of(const std::optional<RowScaleOperand>& out) {
  if (!out) return {};
  return {.wanted = true,
          .chunked = is_chunked(out->qdata.data, out->qdata.dim(-1)),
          .qdata = out->qdata.data,
          .scale = out->scale.data};
}

}  // namespace

void quantize_row_scale(const RowScaleArgs& args, const Panels& panels, void* stream) {
  // Even rows without columns have a scale, hence at least one tile.
  const int64_t col_tiles = max<int64_t>(ceil_div<int64_t>(panels.cols, kTileCols), 1);
  const int64_t tiles = num_row_tiles(panels, kRowScaleAlignment, panels.rows) * col_tiles;
  Launch how{.op = "quantize_row_scale", .stream = stream, .work = tiles};
  with_format(args.x.format, [&]<class T>() {
    const RowScaleParams<T> params{.panels = panels,
                                   .source = float_source<T>(args.x.data, panels.cols),
                                   .rowwise = form_of(args.rowwise),
                                   .colwise = form_of(args.colwise),
                                   .col_tiles = col_tiles,
                                   .tiles = tiles};
    for (const auto& out : {args.rowwise, args.colwise})
      if (out) zero_async(how, out->scale.data, numel(out->scale.shape) * sizeof(float));
    launch(how, amax_kernel<T>, params);
    for (const auto& out : {args.rowwise, args.colwise}) {
      if (!out) continue;
      const DecodeParams decode{.scale = out->scale.data, .count = numel(out->scale.shape)};
      launch({how.op, stream, ceil_div<int64_t>(decode.count, kThreads)}, decode_kernel, decode);
    }
    how.shared_bytes = static_cast<int>(sizeof(StoreStorage<T>));
    launch(how, store_kernel<T>, params);
  });
}

}  // namespace moxie::cuda
