// The kernel of quantize, requantize and the fused ops, which differ in their source of tiles. A
// CTA processes a run of tiles. It reads each tile once, into registers; row amax is reduced by
// shuffles, column amax through shared memory; the rowwise form is stored from registers, the
// colwise form is transposed in shared memory. docs/kernels/quantize.md has the reasons.
#pragma once

#include <type_traits>

#include "moxie/core/ptx/target.cuh"
#include "moxie/core/quantize/form.cuh"
#include "moxie/core/quantize/quantize.h"
#include "moxie/core/tile/group_search.cuh"
#include "moxie/core/tile/raster.cuh"

namespace moxie::cuda {

template <class Source>
struct QuantizeParams {
  Panels panels;
  Source source;
  FormParams<Form::kRowwise> rowwise;
  FormParams<Form::kColwise> colwise;
  ScaleChoice choice;
  int64_t alignment;  // of colwise groups
  Raster raster;
};

// The stage, a prefetch buffer in shared memory. Only the colwise form needs one: its barriers
// (column amax, transpose) would otherwise leave no loads in flight.
template <class Source, bool kColwise>
struct StageOf {
  using Type = Nothing;
};
template <class Source>
requires(Source::kStaged) struct StageOf<Source, true> {
  using Type = typename Source::Stage;
};

template <class Source, bool kColwise>
struct QuantizeStorage {
  using T = typename Fragment<typename Source::Element>::AmaxElement;
  alignas(16) typename StageOf<Source, kColwise>::Type stage;
  alignas(16) Amax<T> columns[kWarps][kFragmentLanes];  // column amax over each warp's 16 rows
  alignas(4) uint8_t row_code[kTileRows][4];            // one per 32 columns
  alignas(8) uint8_t col_code[4][kTileCols];            // one per 32 rows
  std::conditional_t<kColwise, ByteTile, Nothing> tile;
  Place rowwise, colwise;
  typename Source::Shared source;
  RowTileSearch search;
};

// The amax of the blocks that contain this thread's fragment: one per column, or, if blocks are
// wider than a column, the same value for all eight columns or rows.
template <class T>
__device__ Amax<T> block_amax(const Amax<T> (&columns)[kWarps][kFragmentLanes], Block block) {
  const int lane = lane_index() % kFragmentLanes;
  Amax<T> amax;
  if (block.rows == kMxBlock) {
    const int warp = warp_index() & ~1;
    amax = columns[warp][lane];
    update_amax(amax, columns[warp + 1][lane]);
  } else {
    amax = columns[0][lane];
#pragma unroll
    for (int warp = 1; warp < kWarps; ++warp) update_amax(amax, columns[warp][lane]);
  }
  if (block.cols == 1) return amax;
  uint32_t most = amax.overall();
#pragma unroll
  for (int step = 1; step < kFragmentLanes; step *= 2)
    if (step * kFragment < block.cols)
      most = Amax<T>::max_of(most, __shfl_xor_sync(~0u, most, step));
#pragma unroll
  for (int i = 0; i < Amax<T>::kWords; ++i) amax.word[i] = most;
  return amax;
}
static_assert(kMxBlock == 2 * kWarpRows, "two warps share a block of 32 rows");
static_assert(sides_are<1, 32, 128>());

// Stores the rowwise form of this thread's fragment, and its scale codes in s.row_code. Four
// neighbouring lanes have the codes of the same 32 columns; each writes those of two rows.
template <bool kAligned, class Element, class Storage>
__device__ void quantize_rows(Storage& s, const TileOut& out, const Fragment<Element>& fragment,
                              const Scales<typename Fragment<Element>::AmaxElement>& scales) {
  const int row = fragment_row(), col = fragment_col(), lane = lane_index();
  e4m3* to = out.qdata + row * out.stride + col;
#pragma unroll
  for (int i = 0; i < kFragment; ++i, to += out.stride) {
    float x[kFragment];
    fragment.by_row(i, scales, x);
    store_piece<kAligned>(to, uint2{ptx::encode4(x), ptx::encode4(x + 4)},
                          row + i < out.outer ? out.k - col : 0);
  }
  const uint32_t two = (lane % 4 < 2 ? scales.code[0] : scales.code[1]) >> (lane % 2 * 16);
  const int first = row + lane % 4 * 2;
  s.row_code[first][col / kMxBlock] = static_cast<uint8_t>(two);
  s.row_code[first + 1][col / kMxBlock] = static_cast<uint8_t>(two >> 8);
  __syncwarp();
}

// Writes the colwise form of this thread's fragment, and its scale codes, to shared memory.
template <class Element, class Storage>
__device__ void quantize_columns(Storage& s, const Fragment<Element>& fragment,
                                 const Scales<typename Fragment<Element>::AmaxElement>& scales,
                                 int rows) {
  if (warp_index() % 2 == 0 && lane_index() < kFragmentLanes)
    *reinterpret_cast<uint2*>(&s.col_code[warp_index() / 2][fragment_col()]) =
        uint2{scales.code[0], scales.code[1]};
  transpose_fragment(s.tile, rows - fragment_row(), fragment, scales);
}

template <bool kRowwise, bool kColwise, class Source, class Storage>
__device__ void find_places(const QuantizeParams<Source>& p, Storage& s, const RowTile& at) {
  if (kRowwise && threadIdx.x == 0)
    s.rowwise = place_of(p.panels, at.panel, Form::kRowwise, p.rowwise.block, p.rowwise.layout);
  if (kColwise && threadIdx.x == kWarp)
    s.colwise = place_of(p.panels, at.panel, Form::kColwise, p.colwise.block, p.colwise.layout);
  __syncthreads();
}

// Quantizes a run of tiles. A load brings kParts tiles ("parts"; two for SwiGLU's gate and up).
//
// `tall`: rowwise blocks are taller than a row, so the rowwise amax is made of column amaxes too.
// Each part passes up to three barriers:
//
//   barrier  present if          written before, read after it
//   B1       tall                columns (rowwise amax reads them)
//   B2       kColwise && !tall   columns (colwise amax reads them), row_code
//   B3       kColwise || tall    tile and col_code; row_code if tall
//
// Shared memory is used again by the next part, which writes `columns` after B3, and row_code, tile
// and col_code after B3 and its own B1 or B2 (row_code, if not tall, is read before B3 already). If
// neither kColwise nor tall, each warp stores the scales of its own rows and needs only
// __syncwarp(). The stage needs no barrier: each thread reads what it staged itself.
template <class Source, bool kRowwise, bool kColwise, class Storage>
__device__ void quantize_run(const QuantizeParams<Source>& p, Storage& s, const RowTile& at,
                             int64_t col) {
  using Element = typename Source::Element;
  using AmaxElement = typename Fragment<Element>::AmaxElement;
  constexpr int kParts = Source::kParts;
  const int64_t cols = p.panels.cols / kParts, step = p.raster.step;
  const bool tall = kRowwise && p.rowwise.block.rows > 1;
  const Source source = p.source.at_rows(p.panels, at, s.source);
  const int rows = clip(at.panel.rows - at.row, kTileRows);
  const auto span_at = [&](int64_t c) {
    return TileSpan{.row = at.row, .col = c, .rows = rows, .cols = clip(cols - c, kTileCols)};
  };
  Fragment<Element> fragments[kParts];
  [[maybe_unused]] typename Source::Held held;
  constexpr bool kStaged = Source::kStaged && kColwise;
  const auto load = [&](int64_t c) {
    if constexpr (kStaged)
      source.stage(span_at(c), s.stage);
    else
      source.load(span_at(c), fragments);
  };
  // The first load overlaps find_places(). With two parts this would spill a register.
  constexpr bool kLoadFirst = kParts == 1;
  if (kLoadFirst) load(col);
  find_places<kRowwise, kColwise>(p, s, at);
  TileOut row_out{}, col_out{};
  if constexpr (kRowwise) row_out = tile_out(p.rowwise, s.rowwise, at, p.panels, col);
  if constexpr (kColwise) col_out = tile_out(p.colwise, s.colwise, at, p.panels, col);
  row_out.outer = rows;
  // With the colwise form, the last kTileRows threads store the row scales (the others are busy
  // with the column scales), after barrier B2 or B3. Without it, each warp stores those of its own
  // rows.
  const auto store_row_scales = [&](int64_t at_col) {
    const int line =
        kColwise ? scale_line(p.rowwise, static_cast<int>(threadIdx.x % unsigned{kTileRows}))
                 : warp_index() * kWarpRows + lane_index() % kWarpRows;
    if (kColwise ? threadIdx.x >= kThreads - kTileRows : lane_index() < kWarpRows)
      TileScales<Form::kRowwise>{p.rowwise, s.rowwise, at.row, at_col}.store(
          row_out, line, *reinterpret_cast<const uint32_t*>(s.row_code[line]));
  };
  if (!kLoadFirst) load(col);
  if constexpr (kStaged) source.hold(span_at(col), held);
  for (;;) {
    if constexpr (kStaged) source.unstage(span_at(col), s.stage, held, fragments);
    // The stride is read from shared memory again for every tile, to save registers.
    if constexpr (kRowwise) row_out.stride = s.rowwise.qdata_stride;
    row_out.k = col_out.outer = clip(cols - col, kTileCols);
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      Fragment<Element>& fragment = fragments[part];
      const int64_t part_col = col + part * source.part_cols();
      const int64_t moved =
          part + 1 < kParts ? source.part_cols() : step - (kParts - 1) * source.part_cols();
      fragment.prepare();
      if constexpr (kStaged)
        if (part + 1 == kParts && col + step < cols) source.hold(span_at(col + step), held);
      if (kColwise || tall) {
        Amax<AmaxElement> mine = fragment.columns();
        amax_over_lanes<kFragmentLanes>(mine);
        if (lane_index() < kFragmentLanes) s.columns[warp_index()][lane_index()] = mine;
      }
      // Prefetches the next tile into the stage. All of the stage has been read: the amax above
      // needs it.
      if (kStaged && part == 0 && col + step < cols) load(col + step);
      if (tall) __syncthreads();  // B1
      if constexpr (kRowwise) {
        Amax<AmaxElement> amax;
        if (tall) {
          amax = block_amax(s.columns, p.rowwise.block);
        } else {
          amax = fragment.rows();
          amax_over_lanes<kMxBlock / kFragment - 1>(amax);
          if (p.rowwise.block.cols > kMxBlock)
            amax_over_lanes<kFragmentLanes - kMxBlock / kFragment>(amax);
        }
        quantize_rows<Source::kAligned>(s, row_out, fragment, Scales<AmaxElement>(amax, p.choice));
        if constexpr (!kColwise) {
          store_row_scales(part_col);
          __syncwarp();
        }
        row_out.qdata += moved;
      }
      if constexpr (kColwise) {
        if (!tall) __syncthreads();  // B2
        if (kRowwise && !tall) store_row_scales(part_col);
        quantize_columns(s, fragment,
                         Scales<AmaxElement>(block_amax(s.columns, p.colwise.block), p.choice),
                         rows);
      }

      // The fragments have been used, so the load of the next tile overlaps the store of this one.
      if (!kStaged && part + 1 == kParts && col + step < cols) load(col + step);
      if (kColwise || tall) __syncthreads();  // B3
      if constexpr (kColwise) {
        if (kRowwise && tall) store_row_scales(part_col);
        col_out.stride = s.colwise.qdata_stride;
        store_tile<Source::kAligned>(col_out, s.tile);
        store_column_scales({p.colwise, s.colwise, part_col, at.row}, col_out, s.col_code);
        col_out.qdata += moved * col_out.stride;
      }
    }
    col += step;
    if (col >= cols) break;
  }
}

template <class Source, bool kRowwise, bool kColwise>
__global__ __launch_bounds__(kThreads, Source::kCtas) void quantize_kernel(
    const __grid_constant__ QuantizeParams<Source> p) {
  auto& s = shared_storage<QuantizeStorage<Source, kColwise>>();
  const auto [tile, run] = raster_at(p.raster);
  if (tile >= p.raster.row_tiles) return;
  const RowTile& at = find_row_tile(p.panels, p.alignment, tile, s.search);
  const int64_t col = static_cast<int64_t>(run) * kTileCols;
  if (!at.tail) {
    quantize_run<Source, kRowwise, kColwise>(p, s, at, col);
    return;
  }
  find_places<kRowwise, kColwise>(p, s, at);
  const int64_t first = at.row / kTileRows, tail_tiles = p.raster.row_tiles - (tile - first);
  const int64_t index = first * p.raster.runs + run, count = tail_tiles * p.raster.runs;
  if constexpr (kRowwise) {
    zero_tail<Source::kAligned>(p.rowwise, s.rowwise, at, p.panels, col, p.raster.step);
    zero_swizzled(p.rowwise, s.rowwise, index, count);
  }
  if constexpr (kColwise) {
    zero_tail<Source::kAligned>(p.colwise, s.colwise, at, p.panels, col, p.raster.step);
    zero_swizzled(p.colwise, s.colwise, index, count);
  }
}

// ---- host: params from checked arguments, and the launch ----

inline bool are_forms_aligned(const QuantizeForms& forms) {
  return are_rows_aligned(forms.rowwise, kRowwisePiece) &&
         are_rows_aligned(forms.colwise, kColwisePiece);
}

// Source::kLarge exists if the source needs more shared memory than some GPUs have; callers must
// then check fits_here() first.
template <class Source>
inline constexpr bool kIsLarge = requires {
  Source::kLarge;
};
template <class Source>
bool fits_here(std::string_view op) {
  return sizeof(QuantizeStorage<Source, true>) <= static_cast<size_t>(ptx::shared_here(op));
}

template <class Source>
void launch_quantize(std::string_view op, const QuantizeForms& forms, const Panels& panels,
                     const Source& source, void* stream) {
  const int64_t alignment = forms.colwise ? forms.colwise->block.rows : 1;
  const int64_t row_tiles = num_row_tiles(panels, alignment, panels.rows);
  const int64_t cols = panels.cols / Source::kParts;
  const Raster raster = make_raster(panels, cols, row_tiles, !forms.rowwise && panels.offs,
                                    {.longest = Source::kLongestRun, .ctas_per_sm = Source::kCtas});
  const QuantizeParams<Source> params{.panels = panels,
                                      .source = source,
                                      .rowwise = form_params<Form::kRowwise>(forms.rowwise),
                                      .colwise = form_params<Form::kColwise>(forms.colwise),
                                      .choice = choice_of(forms.rule),
                                      .alignment = alignment,
                                      .raster = raster};
  const auto start = [&]<bool kRowwise, bool kColwise>() {
    constexpr int kShared = sizeof(QuantizeStorage<Source, kColwise>);
    static_assert(kShared <= ptx::kLeastShared || kIsLarge<Source>);
    launch({.op = op, .stream = stream, .work = params.raster.work(), .shared_bytes = kShared},
           quantize_kernel<Source, kRowwise, kColwise>, params);
  };
  if constexpr (std::is_same_v<typename Source::Element, e4m3>) {
    start.template operator()<false, true>();
  } else {
    if (!forms.colwise)
      start.template operator()<true, false>();
    else if (!forms.rowwise)
      start.template operator()<false, true>();
    else
      start.template operator()<true, true>();
  }
}

}  // namespace moxie::cuda
