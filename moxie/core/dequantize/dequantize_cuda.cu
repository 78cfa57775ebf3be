// Rowwise: each thread loads, scales and stores its fragment. Colwise: the tile is transposed in
// shared memory as bytes, before it grows to bf16 or f32. Tiles are cut in the buffer
// (Cut::kInBuffer), so that each column of a tile is one aligned piece of memory.
#include "moxie/core/base/device.h"
#include "moxie/core/dequantize/backends.h"
#include "moxie/core/ptx/l2.cuh"
#include "moxie/core/ptx/target.cuh"
#include "moxie/core/tile/group_search.cuh"
#include "moxie/core/tile/raster.cuh"
#include "moxie/core/tile/store.cuh"

namespace moxie::cuda {
namespace {

template <class T, bool kAligned>
struct DequantizeParams {
  Panels panels;
  RowwiseSource<kAligned> source;  // rowwise
  Block block;
  ScaleLayout layout;
  const e4m3* qdata;
  int64_t qdata_stride;
  const e8m0* scale;
  int row_shift, col_shift;  // log2 of a block's sides
  T* x;
  int64_t alignment;
  Raster raster;
  Ending ending;
  uint32_t ctas_at_once;
};

// For the colwise form: a double buffer for the current tile and the next.
struct TransposedTiles {
  ByteTile tile[2];
  alignas(8) e8m0 code[2][kMaxRowBlocks][kTileCols];
  Place place;
};

template <Form kForm>
struct DequantizeStorage {
  std::conditional_t<kForm == Form::kRowwise, Nothing, TransposedTiles> tiles;
  Nothing source;
  RowTileSearch search;
};

// Eight elements of x as packed words.
template <class T>
struct Row {
  static constexpr int kWords = kFragment * sizeof(T) / 4;
  uint32_t word[kWords] = {};

  __device__ void set(int j, float a, float b) {  // j is even
    if constexpr (kWords == kFragment) {
      word[j] = std::bit_cast<uint32_t>(with_one_nan(a));
      word[j + 1] = std::bit_cast<uint32_t>(with_one_nan(b));
    } else {
      word[j / 2] = to_bf16_pair(a, b);
    }
  }
};

// Does what store_row() does for bf16, with one 128-bit integer. With four words the compiler makes
// four stores if it moves their last instructions into the branch.
__device__ void store_whole(bf16* to, int count, const Row<bf16>& row) {
  const auto pair = [&](int i) {
    return static_cast<uint64_t>(row.word[i + 1]) << 32 | row.word[i];
  };
  if (count > 0)
    *reinterpret_cast<unsigned __int128*>(to) =
        static_cast<unsigned __int128>(pair(2)) << 64 | pair(0);
}

template <class T, bool kAligned>
struct RowwiseRun {
  RowwiseSource<kAligned> source;
  Fragment<e4m3> fragment[1];

  __device__ RowwiseRun(const DequantizeParams<T, kAligned>& p,
                        DequantizeStorage<Form::kRowwise>& s, const RowTile& at)
      : source(p.source.at_rows(p.panels, at, s.source)) {}
  __device__ void load(const TileSpan& span) { source.load(span, fragment); }
  // Calls store(i, row i of the fragment) for every row, then load_next().
  template <class Store, class Load>
  __device__ void finish(Store&& store, Load&& load_next) {
    fragment[0].share_codes();
#pragma unroll
    for (int i = 0; i < kFragment; ++i) {
      float x[kFragment];
      fragment[0].row(i, x);
      Row<T> row;
#pragma unroll
      for (int j = 0; j < kFragment; j += 2) row.set(j, x[j], x[j + 1]);
      store(i, row);
    }
    load_next();
  }
};

// Colwise: the next tile is copied to shared memory while this one is decoded.
template <class T, bool kAligned>
struct ColwiseRun {
  static constexpr int kCodes = kMaxRowBlocks * kTileCols / kThreads;
  static_assert(kCodes == 2);
  const DequantizeParams<T, kAligned>& p;
  TransposedTiles& s;
  uint8_t code[kCodes];
  int loaded = 0;  // index of the buffer that was loaded last

  __device__ ColwiseRun(const DequantizeParams<T, kAligned>& params,
                        DequantizeStorage<Form::kColwise>& storage, const RowTile& at)
      : p(params), s(storage.tiles) {
    if (threadIdx.x == 0) s.place = place_of(p.panels, at.panel, Form::kColwise, p.block, p.layout);
    __syncthreads();
  }

  __device__ void load(const TileSpan& span) {
    const e4m3* from = p.qdata + s.place.qdata + span.col * s.place.qdata_stride + span.row;
    loaded ^= 1;
    ByteTile& tile = s.tile[loaded];
    for_each_chunk([&](int line, int index) {
      const e4m3* const at = from + line * s.place.qdata_stride + index * kColwisePiece;
      const int left = line < span.cols ? span.rows - index * kColwisePiece : 0;
      if (kAligned && left > 0)
        tile.copy(line, index, at);
      else
        tile.store(line, index, load_piece<kAligned>(at, left));
    });
    __pipeline_commit();
    if (p.layout == ScaleLayout::kSwizzled)
      load_swizzled(span);
    else
      load_plain(span);
  }

  // Loads plain scales, or quads. With quads a column has one scale for all rows of a tile.
  __device__ void load_plain(const TileSpan& span) {
    const int col = threadIdx.x % kTileCols;
    const e8m0* codes = p.scale + scale_index(s.place, p.layout, (span.col + col) >> p.col_shift,
                                              span.row >> p.row_shift);
#pragma unroll
    for (int k = 0; k < kCodes; ++k) {
      const int row = (threadIdx.x / kTileCols + k * (kThreads / kTileCols)) * kMxBlock;
      code[k] = 0;
      if (col < span.cols && is_inside(span, row)) code[k] = codes[row >> p.row_shift].code;
    }
  }

  // The order of threads for swizzled scales: that of the scales in memory, two threads per column.
  static constexpr int kBand = kScaleTileRows / kScaleTileCols;
  __device__ static int swizzled_col() {
    const int word = static_cast<int>(threadIdx.x) / kCodes;
    return word % static_cast<int>(kScaleTileCols) * kBand +
           word / static_cast<int>(kScaleTileCols);
  }
  __device__ static int swizzled_block(int code_index) {
    return threadIdx.x % kCodes * kCodes + code_index;
  }

  // A tile may straddle two tiles of scales, because tiles are cut in the buffer, but tiles of
  // scales at panels.
  __device__ void load_swizzled(const TileSpan& span) {
    const e8m0* codes = p.scale + s.place.scale +
                        span.col / kTileCols * s.place.scale_stride * kScaleTileBytes +
                        swizzled_index(swizzled_col(), 0, 1);
    const auto first = static_cast<int>(span.row / kMxBlock);
#pragma unroll
    for (int k = 0; k < kCodes; ++k) {
      const int block = first + swizzled_block(k);
      code[k] = 0;
      if (is_inside(span, swizzled_block(k) * kMxBlock))
        code[k] = codes[(block >> 2) * kScaleTileBytes + (block & 3)].code;
    }
  }
  static_assert(kScaleTileCols == 4);

  __device__ static bool is_inside(const TileSpan& span, int row) {
    return row < span.rows && span.row + row >= 0;
  }

  __device__ void store_codes(TransposedTiles& tiles, int index) const {
    const auto thread = static_cast<int>(threadIdx.x);
#pragma unroll
    for (int k = 0; k < kCodes; ++k) {
      if (p.layout == ScaleLayout::kSwizzled)
        tiles.code[index][swizzled_block(k)][swizzled_col()] = {code[k]};
      else
        tiles.code[index][thread / kTileCols + k * (kThreads / kTileCols)][thread % kTileCols] = {
            code[k]};
    }
  }

  template <class Store, class Load>
  __device__ void finish(Store&& store, Load&& load_next) {
    const int mine = loaded;
    store_codes(s, mine);
    __pipeline_wait_prior(0);
    // After this barrier the tile is complete, and all threads have decoded the previous one.
    __syncthreads();
    load_next();
    // A fragment's eight rows share a block, as colwise blocks have 32 or more rows.
    const e8m0* codes = &s.code[mine][fragment_row() / kMxBlock][fragment_col()];
    Row<T> rows[kFragment];
#pragma unroll
    for (int j = 0; j < kFragment; j += 2) {
      float x[2][kFragment];
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const uint2 piece = s.tile[mine].piece(j + k);
        ptx::decode4(piece.x, x[k]);
        ptx::decode4(piece.y, x[k] + 4);
        const float scale = factor_of(codes[j + k].code);
#pragma unroll
        for (int r = 0; r < kFragment; ++r) x[k][r] *= scale;
      }
#pragma unroll
      for (int r = 0; r < kFragment; ++r) rows[r].set(j, x[0][r], x[1][r]);
    }
#pragma unroll
    for (int r = 0; r < kFragment; ++r) store(r, rows[r]);
  }
};

constexpr Cut cut_of(Form form) { return form == Form::kRowwise ? Cut::kAtPanels : Cut::kInBuffer; }

// CTAs per SM: limited by registers.
template <class T>
constexpr int ctas_per_sm(Form form) {
  if (form == Form::kRowwise) return 4;
  return sizeof(T) == 2 ? 3 : 2;
}

// Prefetches the first wave's tiles to L2 while the CTAs search for their rows. The address is a
// guess that ignores offs: close enough, as memory is idle then.
template <Form kForm, class T, bool kAligned>
__device__ void prefetch_tile(const DequantizeParams<T, kAligned>& p, uint32_t tile, int64_t col) {
  constexpr bool kRowwise = kForm == Form::kRowwise;
  const int64_t first = int64_t{tile} * kTileRows, lines = kRowwise ? p.panels.rows : p.panels.cols;
  if (threadIdx.x >= kTileCols || lines * p.qdata_stride == 0 || p.panels.weights) return;
  const int64_t line = min<int64_t>((kRowwise ? first : col) + threadIdx.x, lines - 1);
  const int64_t at = min<int64_t>(kRowwise ? col : first, p.qdata_stride - 1);
  ptx::prefetch_l2(p.qdata + line * p.qdata_stride + at);
}
static_assert(kTileRows == kTileCols);

template <class T, Form kForm, bool kAligned>
__global__ __launch_bounds__(kThreads, ctas_per_sm<T>(kForm)) void dequantize_kernel(
    const __grid_constant__ DequantizeParams<T, kAligned> p) {
  auto& s = shared_storage<DequantizeStorage<kForm>>();
  const auto work = static_cast<uint32_t>(work_index());
  const auto col_tiles = static_cast<uint32_t>(ceil_div<int64_t>(p.panels.cols, kTileCols));
  const auto [tile, run_index, runs] = ending_at(p.ending, work, p.raster.runs, col_tiles);
  const int64_t step = static_cast<int64_t>(runs) * kTileCols;
  if (tile >= p.raster.row_tiles) return;
  if (work < p.ctas_at_once)
    prefetch_tile<kForm>(p, tile, static_cast<int64_t>(run_index) * kTileCols);
  constexpr Cut kCut = cut_of(kForm);
  const RowTile& at = find_row_tile<kCut>(p.panels, p.alignment, tile, s.search);
  const int64_t left = at.tail ? p.panels.rows - at.panel.begin : at.panel.rows;
  TileSpan span{.row = at.row,
                .col = static_cast<int64_t>(run_index) * kTileCols,
                .rows = clip(left - at.row, kTileRows),
                .cols = 0};
  const auto store = [&](int i, const Row<T>& row) {
    const int64_t at_row = at.panel.begin + span.row + fragment_row() + i;
    T* const to = p.x + at_row * p.panels.cols + span.col + fragment_col();
    // The tile may begin before the panel. Panels begin at multiples of 32 rows of the buffer, so
    // all rows of a fragment are then before the panel, or none.
    const bool before = kForm == Form::kColwise && span.row + fragment_row() < 0;
    const int count = fragment_row() + i < span.rows && !before ? span.cols - fragment_col() : 0;
    if constexpr (kForm == Form::kRowwise && kAligned && std::is_same_v<T, bf16>)
      store_whole(to, count, row);
    else
      store_row<kAligned>(to, count, row.word);
  };
  if (at.tail) {
#pragma unroll 1
    for (; span.col < p.panels.cols; span.col += step) {
      span.cols = clip(p.panels.cols - span.col, kTileCols);
#pragma unroll
      for (int i = 0; i < kFragment; ++i) store(i, {});
    }
    return;
  }
  std::conditional_t<kForm == Form::kRowwise, RowwiseRun<T, kAligned>, ColwiseRun<T, kAligned>> run(
      p, s, at);
  span.cols = clip(p.panels.cols - span.col, kTileCols);
  run.load(span);
  while (span.cols > 0) {
    TileSpan next = span;
    next.col += step;
    next.cols = clip(p.panels.cols - next.col, kTileCols);
    run.finish(store, [&] {
      if (next.cols > 0) run.load(next);
    });
    span = next;
  }
}

}  // namespace

static_assert(sizeof(DequantizeStorage<Form::kRowwise>) <= ptx::kLeastShared &&
              sizeof(DequantizeStorage<Form::kColwise>) <= ptx::kLeastShared);

void dequantize(const DequantizeArgs& args, const Panels& panels, void* stream) {
  const bool rowwise = args.form == Form::kRowwise;
  const int64_t alignment = rowwise ? 1 : args.block.rows;
  const int64_t row_tiles = num_row_tiles(panels, alignment, panels.rows, cut_of(args.form));
  const Raster raster = make_raster(panels, panels.cols, row_tiles, false,
                                    {.longest = 2, .ctas_per_sm = ctas_per_sm<bf16>(args.form)});
  const int64_t col_tiles = ceil_div<int64_t>(panels.cols, kTileCols),
                likely = likely_row_tiles(panels, alignment, cut_of(args.form));
  with_format(args.x.format, [&]<class T>() {
    const int ctas_at_once = num_multiprocessors(-1) * ctas_per_sm<T>(args.form);
    const Ending ending = Ending::of(row_tiles, likely, col_tiles, ctas_at_once);
    const Launch how{
        .op = "dequantize",
        .stream = stream,
        .work = ending.work(row_tiles, raster.runs, col_tiles),
        .shared_bytes = static_cast<int>(rowwise ? sizeof(DequantizeStorage<Form::kRowwise>)
                                                 : sizeof(DequantizeStorage<Form::kColwise>))};
    auto* x = static_cast<T*>(args.x.data);
    const bool aligned = are_rows_aligned(x, panels.cols, kFragment) &&
                         are_rows_aligned(args.qdata.data, args.qdata.dim(-1),
                                          rowwise ? kRowwisePiece : kColwisePiece);
    with_alignment(aligned, [&]<bool kAligned>() {
      const DequantizeParams<T, kAligned> params{
          .panels = panels,
          .source = rowwise_source<kAligned>(args.qdata.data, args.scale.data, args.block,
                                             args.layout, panels),
          .block = args.block,
          .layout = args.layout,
          .qdata = args.qdata.data,
          .qdata_stride = args.qdata.dim(-1),
          .scale = args.scale.data,
          .row_shift = std::countr_zero(static_cast<unsigned>(args.block.rows)),
          .col_shift = std::countr_zero(static_cast<unsigned>(args.block.cols)),
          .x = x,
          .alignment = alignment,
          .raster = raster,
          .ending = ending,
          .ctas_at_once = static_cast<uint32_t>(ctas_at_once)};
      launch(how,
             rowwise ? dequantize_kernel<T, Form::kRowwise, kAligned>
                     : dequantize_kernel<T, Form::kColwise, kAligned>,
             params);
    });
  });
}

}  // namespace moxie::cuda
