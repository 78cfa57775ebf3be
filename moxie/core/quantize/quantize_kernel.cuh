// The kernel of quantize, of requantize and of the ops fused with them, which differ in where a
// tile comes from. A CTA takes a run of tiles side by side. It reads each once, into registers; the
// amax of rows goes through shuffles, that of columns through shared memory; the rowwise form is
// stored from registers, the colwise one is turned round in shared memory. docs/kernels/quantize.md
// has the reasons.
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

// Both the amax of columns and their turn need barriers, which leave registers waiting; a stage
// keeps bytes on the way meanwhile.
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
  using T = typename Patch<typename Source::Element>::Peak;
  alignas(16) typename StageOf<Source, kColwise>::Type stage;
  alignas(16) Peaks<T> columns[kWarps][kPatchLanes];  // of the rows of each warp
  alignas(4) uint8_t row_code[kTileRows][4];          // one per 32 columns
  alignas(8) uint8_t col_code[4][kTileCols];          // one per 32 rows
  std::conditional_t<kColwise, ByteTile, Nothing> tile;
  Place rowwise, colwise;
  typename Source::Shared source;
  RowTileSearch search;
};

// The highest of each block, for the columns (or, all the same, the rows) of this thread's patch.
template <class T>
__device__ Peaks<T> block_peaks(const Peaks<T> (&columns)[kWarps][kPatchLanes], Block block) {
  const int lane = lane_index() % kPatchLanes;
  Peaks<T> peaks;
  if (block.rows == kMxBlock) {
    const int warp = warp_index() & ~1;
    peaks = columns[warp][lane];
    raise(peaks, columns[warp + 1][lane]);
  } else {
    peaks = columns[0][lane];
#pragma unroll
    for (int warp = 1; warp < kWarps; ++warp) raise(peaks, columns[warp][lane]);
  }
  if (block.cols == 1) return peaks;
  uint32_t most = peaks.highest();
#pragma unroll
  for (int step = 1; step < kPatchLanes; step *= 2)
    if (step * kPatch < block.cols) most = Peaks<T>::higher(most, __shfl_xor_sync(~0u, most, step));
#pragma unroll
  for (int i = 0; i < Peaks<T>::kWords; ++i) peaks.word[i] = most;
  return peaks;
}
static_assert(kMxBlock == 2 * kWarpRows, "two warps share a block of 32 rows");

// The rowwise form of this thread's patch, to `to` and on. Four lanes have the codes of the same 32
// columns; each of them hands over two rows' codes, all inside a warp.
template <bool kAligned, class Element, class Storage>
__device__ void quantize_rows(Storage& s, const TileOperand& out, const Patch<Element>& patch,
                              const Scales<typename Patch<Element>::Peak>& scales) {
  const int row = patch_row(), col = patch_col(), lane = lane_index();
  e4m3* to = out.qdata + row * out.stride + col;
#pragma unroll
  for (int i = 0; i < kPatch; ++i, to += out.stride) {
    float x[kPatch];
    patch.by_row(i, scales, x);
    store_piece<kAligned>(to, uint2{ptx::encode4(x), ptx::encode4(x + 4)},
                          row + i < out.outer ? out.k - col : 0);
  }
  const uint32_t two = (lane % 4 < 2 ? scales.code[0] : scales.code[1]) >> lane % 2 * 16;
  const int first = row + lane % 4 * 2;
  s.row_code[first][col / kMxBlock] = static_cast<uint8_t>(two);
  s.row_code[first + 1][col / kMxBlock] = static_cast<uint8_t>(two >> 8);
  __syncwarp();
}

// The colwise form of this thread's patch, into shared memory.
template <class Element, class Storage>
__device__ void quantize_columns(Storage& s, const Patch<Element>& patch,
                                 const Scales<typename Patch<Element>::Peak>& scales, int rows) {
  if (warp_index() % 2 == 0 && lane_index() < kPatchLanes)
    *reinterpret_cast<uint2*>(&s.col_code[warp_index() / 2][patch_col()]) =
        uint2{scales.code[0], scales.code[1]};
  turn_patch(s.tile, rows - patch_row(), patch, scales);
}

template <bool kRowwise, bool kColwise, class Source, class Storage>
__device__ void find_places(const QuantizeParams<Source>& p, Storage& s, const RowTile& at) {
  if (kRowwise && threadIdx.x == 0)
    s.rowwise = place_of(p.panels, at.panel, Form::kRowwise, p.rowwise.block, p.rowwise.layout);
  if (kColwise && threadIdx.x == kWarp)
    s.colwise = place_of(p.panels, at.panel, Form::kColwise, p.colwise.block, p.colwise.layout);
  __syncthreads();
}

template <class Source, bool kRowwise, bool kColwise, class Storage>
__device__ void quantize_run(const QuantizeParams<Source>& p, Storage& s, const RowTile& at,
                             int64_t col) {
  using Element = typename Source::Element;
  using Peak = typename Patch<Element>::Peak;
  constexpr int kParts = Source::kParts;
  const int64_t cols = p.panels.cols / kParts, step = p.raster.step;
  const bool tall = kRowwise && p.rowwise.block.rows > 1;
  const Source source = p.source.at_rows(p.panels, at, s.source);
  const int rows = clip(at.panel.rows - at.row, kTileRows);
  const auto span_at = [&](int64_t c) {
    return TileSpan{.row = at.row, .col = c, .rows = rows, .cols = clip(cols - c, kTileCols)};
  };
  Patch<Element> patches[kParts];
  [[maybe_unused]] typename Source::Held held;
  constexpr bool kStaged = Source::kStaged && kColwise;
  const auto load = [&](int64_t c) {
    if constexpr (kStaged)
      source.stage(span_at(c), s.stage);
    else
      source.load(span_at(c), patches);
  };
  // The first tile travels while its place is looked for. With two parts that takes a register more
  // than there are.
  constexpr bool kLoadFirst = kParts == 1;
  if (kLoadFirst) load(col);
  find_places<kRowwise, kColwise>(p, s, at);
  TileOperand row_out{}, col_out{};
  if constexpr (kRowwise) row_out = tile_operand(p.rowwise, s.rowwise, at, p.panels, col);
  if constexpr (kColwise) col_out = tile_operand(p.colwise, s.colwise, at, p.panels, col);
  row_out.outer = rows;
  // Behind a barrier, if there is one, by the threads that store no colwise scales; else by each
  // warp its own.
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
    if constexpr (kStaged) source.unstage(s.stage, held, patches);
    // Read again, so that no register holds them from one tile to the next.
    if constexpr (kRowwise) row_out.stride = s.rowwise.qdata_stride;
    row_out.k = col_out.outer = clip(cols - col, kTileCols);
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      Patch<Element>& patch = patches[part];
      const int64_t part_col = col + part * source.part_cols();
      const int64_t moved =
          part + 1 < kParts ? source.part_cols() : step - (kParts - 1) * source.part_cols();
      patch.prepare();
      if constexpr (kStaged)
        if (part + 1 == kParts && col + step < cols) source.hold(span_at(col + step), held);
      if (kColwise || tall) {
        Peaks<Peak> mine = patch.columns();
        raise_over_lanes<kPatchLanes>(mine);
        if (lane_index() < kPatchLanes) s.columns[warp_index()][lane_index()] = mine;
      }
      // What was staged has been read: the amax above has seen it.
      if (kStaged && part == 0 && col + step < cols) load(col + step);
      if (tall) __syncthreads();
      if constexpr (kRowwise) {
        Peaks<Peak> peaks;
        if (tall) {
          peaks = block_peaks(s.columns, p.rowwise.block);
        } else {
          peaks = patch.rows();
          raise_over_lanes<kMxBlock / kPatch - 1>(peaks);
          if (p.rowwise.block.cols > kMxBlock)
            raise_over_lanes<kPatchLanes - kMxBlock / kPatch>(peaks);
        }
        quantize_rows<Source::kAligned>(s, row_out, patch, Scales<Peak>(peaks, p.choice));
        if constexpr (!kColwise) {
          store_row_scales(part_col);
          __syncwarp();
        }
        row_out.qdata += moved;
      }
      if constexpr (kColwise) {
        if (!tall) __syncthreads();
        if (kRowwise && !tall) store_row_scales(part_col);
        quantize_columns(s, patch, Scales<Peak>(block_peaks(s.columns, p.colwise.block), p.choice),
                         rows);
      }

      // At the latest: the next tile travels while this one leaves shared memory.
      if (!kStaged && part + 1 == kParts && col + step < cols) load(col + step);
      if (kColwise || tall) __syncthreads();
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

// The host's part: params from checked arguments, and the launch.
inline bool are_aligned(const QuantizeForms& forms) {
  return is_aligned(forms.rowwise, kRowwisePiece) && is_aligned(forms.colwise, kColwisePiece);
}

// A source that has kLarge needs more shared memory than every GPU has: to be asked for before.
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
