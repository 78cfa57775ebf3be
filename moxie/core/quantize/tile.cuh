// The kernel of quantize and of requantize, which differ in where a tile comes from.
#pragma once

#include "moxie/core/layout/check.h"
#include "moxie/core/layout/tile.cuh"

namespace moxie::cuda {

template <Form kForm>
struct FormParams {  // one form of the result
  bool wanted = false;
  Block block{};
  ScaleLayout layout = ScaleLayout::kPlain;
  BlockGrid grid{};
  bool chunked = false;
  e4m3* qdata = nullptr;
  e8m0* scale = nullptr;
};

template <class Source>
struct QuantizeParams {
  Panels panels;
  Source source;
  FormParams<Form::kRowwise> rowwise;
  FormParams<Form::kColwise> colwise;
  ScaleRule rule;
  int64_t alignment;  // of colwise groups
  int64_t col_tiles, tiles;
};

struct FormStorage {
  uint32_t amax[kMaxBlocks];
  float inverse[kMaxBlocks];
  e8m0 code[kMaxBlocks];
  Place place;
};

template <class Source>
struct QuantizeStorage {
  TileBuffer<Chunk<typename Source::Element>> tile;
  FormStorage rowwise, colwise;
  RowTileSearch search;
};

template <Form kForm>
__device__ void find_place(const FormParams<kForm>& form, const Panels& panels, const Panel& panel,
                           FormStorage& to) {
  if (form.wanted) to.place = place_of(panels, panel, kForm, form.block, form.layout);
}

// The part of an operand that a tile fills. In the tail, that is what no group covers.
template <Form kForm>
__device__ TileOperand tile_operand(const FormParams<kForm>& form, const Place& place,
                                    const RowTile& at, const Panels& panels, int64_t col) {
  constexpr bool kRowwise = kForm == Form::kRowwise;
  const int64_t rows = !at.tail   ? (kRowwise ? at.panel.rows : place.k)
                       : kRowwise ? panels.rows - at.panel.begin
                                  : place.qdata_stride - at.panel.padded;
  const int tile_rows = clip(rows - at.row, kTileRows),
            tile_cols = clip(panels.cols - col, kTileCols);
  const int64_t outer = kRowwise ? at.row : col, k = kRowwise ? col : at.row;
  return {.qdata = form.qdata + place.qdata + outer * place.qdata_stride + k,
          .stride = place.qdata_stride,
          .chunked = form.chunked,
          .outer = kRowwise ? tile_rows : tile_cols,
          .k = kRowwise ? tile_cols : tile_rows};
}

__device__ inline void choose_scales(FormStorage& form, BlockGrid grid, ScaleRule rule) {
  for (int i = threadIdx.x; i < grid.count(); i += kThreads) {
    form.code[i] = scale_of(std::bit_cast<float>(form.amax[i]), rule);
    form.inverse[i] = inverse(form.code[i]);
  }
}

template <Form kForm>
__device__ void store_plain(const FormParams<kForm>& form, const FormStorage& from,
                            const TileSpan& span) {
  constexpr bool kRowwise = kForm == Form::kRowwise;
  const int64_t first_row = span.row >> form.grid.row_shift,
                first_col = span.col >> form.grid.col_shift;
  for (int i = threadIdx.x; i < form.grid.count(); i += kThreads) {
    const int row = i / form.grid.cols(), col = i % form.grid.cols();
    if (row << form.grid.row_shift >= span.rows || col << form.grid.col_shift >= span.cols)
      continue;
    const int64_t r = first_row + row, c = first_col + col;
    put_scale(form.scale, from.place, kForm, form.block, ScaleLayout::kPlain, kRowwise ? r : c,
              kRowwise ? c : r, from.code[i]);
  }
}

// A tile has exactly one tile of swizzled scales, which is written whole, padding and all.
template <Form kForm>
__device__ void store_swizzled(const FormParams<kForm>& form, const FormStorage& from,
                               const TileSpan& span) {
  constexpr bool kRowwise = kForm == Form::kRowwise;
  const int64_t outer = kRowwise ? span.row : span.col, k = kRowwise ? span.col : span.row;
  e8m0* scale =
      form.scale + from.place.scale + swizzled_index(outer, k / kMxBlock, from.place.scale_stride);
  for (int i = threadIdx.x; i < kScaleTileBytes; i += kThreads) {
    const int di = i / static_cast<int>(kScaleTileCols),
              dk = i % static_cast<int>(kScaleTileCols) * kMxBlock;
    const bool inside = outer + di < from.place.outer && k + dk < from.place.k;
    const int block = kRowwise ? form.grid.index(di, dk) : form.grid.index(dk, di);
    scale[swizzled_index(di, dk / kMxBlock, 1)] = inside ? from.code[block] : e8m0{};
  }
}

template <Form kForm>
__device__ void store_scales(const FormParams<kForm>& form, const FormStorage& from,
                             const TileSpan& span) {
  if (form.layout == ScaleLayout::kPlain)
    store_plain(form, from, span);
  else
    store_swizzled(form, from, span);
}

template <class Source>
__device__ void quantize_tile(const QuantizeParams<Source>& p, QuantizeStorage<Source>& s,
                              const RowTile& at, const TileSpan& span) {
  const BlockGrid row_grid = p.rowwise.grid, col_grid = p.colwise.grid;
  Magnitudes most{};
  sweep(p.source.in_panel(p.panels, at.panel), span, [&](int row, const auto& chunk) {
    s.tile.at(row, lane_index()) = chunk;
    const Magnitudes here = magnitudes(chunk);
    if (p.rowwise.wanted && row_grid.row_shift == 0) add_amax(s.rowwise.amax, row_grid, row, here);
    raise(most, here);
  });
  // The 16 rows of a warp are inside one block of any that is more than a row tall.
  const int row = warp_index() * kWarpRows;
  if (p.rowwise.wanted && row_grid.row_shift != 0) add_amax(s.rowwise.amax, row_grid, row, most);
  if (p.colwise.wanted) add_amax(s.colwise.amax, col_grid, row, most);
  __syncthreads();

  if (p.rowwise.wanted) choose_scales(s.rowwise, row_grid, p.rule);
  if (p.colwise.wanted) choose_scales(s.colwise, col_grid, p.rule);
  __syncthreads();

  if (p.rowwise.wanted) {
    store_rowwise(tile_operand(p.rowwise, s.rowwise.place, at, p.panels, span.col), s.tile,
                  row_grid, s.rowwise.inverse);
    store_scales(p.rowwise, s.rowwise, span);
  }
  if (p.colwise.wanted) {
    store_colwise(tile_operand(p.colwise, s.colwise.place, at, p.panels, span.col), s.tile,
                  col_grid, s.colwise.inverse, span.rows);
    store_scales(p.colwise, s.colwise, span);
  }
}

template <class Source>
__global__ __launch_bounds__(kThreads) void quantize_kernel(
    const __grid_constant__ QuantizeParams<Source> p) {
  const int64_t tile = work_index();
  if (tile >= p.tiles) return;
  auto& s = shared_storage<QuantizeStorage<Source>>();
  for (int i = threadIdx.x; i < kMaxBlocks; i += kThreads)
    s.rowwise.amax[i] = s.colwise.amax[i] = 0;
  const RowTile& at = find_row_tile(p.panels, p.alignment, tile / p.col_tiles, s.search);
  // One thread each: a place takes several 64-bit divisions.
  if (threadIdx.x == 0) find_place(p.rowwise, p.panels, at.panel, s.rowwise);
  if (threadIdx.x == kWarp) find_place(p.colwise, p.panels, at.panel, s.colwise);
  __syncthreads();
  const int64_t col = tile % p.col_tiles * kTileCols;
  if (!at.tail) {
    quantize_tile(p, s, at,
                  {.row = at.row,
                   .col = col,
                   .rows = clip(at.panel.rows - at.row, kTileRows),
                   .cols = clip(p.panels.cols - col, kTileCols)});
    return;
  }
  if (p.rowwise.wanted) zero(tile_operand(p.rowwise, s.rowwise.place, at, p.panels, col));
  if (p.colwise.wanted) zero(tile_operand(p.colwise, s.colwise.place, at, p.panels, col));
}

// The host's part: params from checked arguments, and the launch.
struct QuantizeForms {
  std::string_view op;
  const std::optional<Operand>& rowwise;
  const std::optional<Operand>& colwise;
  ScaleRule rule;
};

template <Form kForm>
FormParams<kForm> form_params(const std::optional<Operand>& out) {
  if (!out) return {};
  return {.wanted = true,
          .block = out->block,
          .layout = out->layout,
          .grid = grid_of(out->block),
          .chunked = is_chunked(out->qdata.data, out->qdata.dim(-1)),
          .qdata = out->qdata.data,
          .scale = out->scale.data};
}

template <class Source>
void launch_quantize(const QuantizeForms& forms, const Panels& panels, const Source& source,
                     void* stream) {
  const int64_t alignment = forms.colwise ? forms.colwise->block.rows : 1;
  const int64_t col_tiles = ceil_div<int64_t>(panels.cols, kTileCols);
  const QuantizeParams<Source> params{
      .panels = panels,
      .source = source,
      .rowwise = form_params<Form::kRowwise>(forms.rowwise),
      .colwise = form_params<Form::kColwise>(forms.colwise),
      .rule = forms.rule,
      .alignment = alignment,
      .col_tiles = col_tiles,
      .tiles = num_row_tiles(panels, alignment, panels.rows) * col_tiles};
  const Launch how{.op = forms.op,
                   .stream = stream,
                   .work = params.tiles,
                   .shared_bytes = static_cast<int>(sizeof(QuantizeStorage<Source>))};
  // Where groups leave gaps among the scales is known on the device only. Without groups every
  // scale is written.
  for (const auto* out : {&forms.rowwise, &forms.colwise})
    if (panels.offs && *out) zero_async(how, (*out)->scale.data, numel((*out)->scale.shape));
  launch(how, quantize_kernel<Source>, params);
}

}  // namespace moxie::cuda
