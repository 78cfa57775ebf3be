// FP8 to FP8: one byte in and one byte out per element, so instruction count is the bottleneck.
// Tiles are loaded by TMA, two ahead, and stored by TMA, so that threads do not wait for memory. A
// warp has 32 rows x 64 columns: an amax over 32 rows needs no shared memory, and 16 bytes of the
// transposed tile stay together. Rows that lie apart are copied by threads (cp.async) in place of
// TMA. If rows are not multiples of 16 bytes, or the GPU has no TMA, the quantizer's kernel
// (quantize_kernel.cuh) runs instead.
#include <bit>
#include <limits>

#include "moxie/core/base/device.h"
#include "moxie/core/ptx/l2.cuh"
#include "moxie/core/ptx/target.cuh"
#include "moxie/core/ptx/tensor_map.cuh"
#include "moxie/core/ptx/tma.cuh"
#include "moxie/core/requantize/backends.h"
#include "moxie/core/requantize/requantize_storage.cuh"

namespace moxie::cuda {
namespace {

// The functions below are [[maybe_unused]]: on GPUs without TMA the kernel is empty.

// Reduces amax for blocks that are one column wide. If blocks are 32 rows tall, a warp has all rows
// of its blocks. This function and amax_over_block() contain one barrier each: after it, every
// thread has read the tile.
[[maybe_unused]] __device__ void amax_over_columns(RequantizeStorage& s, Block block,
                                                   Amax<bf16>& amax) {
  const int lane = lane_index() % kWarpFragments, first = warp_index() % 2 * kWarpFragments;
  amax_over_lanes<kWarp - kWarpFragments>(amax);
  if (block.rows > kMxBlock && lane_index() < kWarpFragments)
    s.columns[warp_index() / 2][first + lane] = amax;
  __syncthreads();
  if (block.rows == kMxBlock) return;
  amax = s.columns[0][first + lane];
#pragma unroll
  for (int i = 1; i < kRowBlocks; ++i) update_amax(amax, s.columns[i][first + lane]);
}

// Reduces amax for blocks that are 32 or more columns wide, so that a fragment has one value.
[[maybe_unused]] __device__ void amax_over_block(RequantizeStorage& s, Block block,
                                                 Amax<bf16>& amax) {
  const auto update = [](uint32_t& most, uint32_t by) { most = Amax<bf16>::max_of(most, by); };
  uint32_t most = amax.overall();
#pragma unroll
  for (int step = 1; step < kWarp; step *= 2)
    if (step * kFragment != kMxBlock) update(most, __shfl_xor_sync(~0u, most, step));
  const int block_col = my_col() / kMxBlock;
  if ((lane_index() & ~(kMxBlock / kFragment)) == 0)
    s.block_amax[block_col][warp_index() / 2] = most;
  __syncthreads();
  if (block.rows > kMxBlock) {
    const auto update_by_column = [&](int col) {
      const uint4 four = *reinterpret_cast<const uint4*>(s.block_amax[col]);
      update(most, four.x);
      update(most, four.y);
      update(most, four.z);
      update(most, four.w);
    };
    update_by_column(block_col);
    if (block.cols == kTileCols) {
#pragma unroll
      for (int i = 1; i < kColBlocks; ++i) update_by_column(block_col ^ i);
    }
  }
#pragma unroll
  for (uint32_t& two : amax.word) two = most;
}
static_assert(kRowBlocks * sizeof(uint32_t) == sizeof(uint4));
static_assert(sides_are<1, 32, 128>());

// Stores a full tile by TMA, and a partial tile (at the end of a group or of the tensor) from
// threads. `x` and `y` are its coordinates along k and along the columns.
[[maybe_unused]] __device__ void store_transposed(const RequantizeParams& p, const TileOut& out,
                                                  const TransposedTile& tile, int32_t x,
                                                  int32_t y) {
  if (out.k == kTileRows && out.outer == kTileCols) {
    if (threadIdx.x != 0) return;
    // Half of a 256-byte L2 line. The tile above or below writes the other half, so keep it in L2.
    ptx::tma_store_3d(&p.transposed, &tile, x, y / kFragment, 0, ptx::keep_in_l2());
    ptx::bulk_commit_group();
    return;
  }
  const int line = threadIdx.x / kLineChunks, index = threadIdx.x % kLineChunks;
  const bool inside = index * kColwisePiece < out.k;
  e4m3* to = out.qdata + line * out.stride + index * kColwisePiece;
#pragma unroll 1
  for (int i = line; i < kTileCols; i += kChunkLines, to += kChunkLines * out.stride)
    store_piece<true>(to, tile.chunk(i, index), inside ? out.outer - i : 0);
}

[[maybe_unused]] __device__ void load_tile(const RequantizeParams& p, RequantizeStorage& s,
                                           const RowTile& at, int64_t col, int index) {
  uint64_t* arrived = &s.arrived[index % kStages];
  ptx::mbarrier_arrive_expect_tx(arrived, sizeof(RowStage));
  ptx::tma_load_2d(&p.qdata, arrived, &s.stage[index % kStages],
                   static_cast<int32_t>(col) + index * kTileCols,
                   static_cast<int32_t>(at.panel.begin + at.row), ptx::keep_in_l2());
}

enum class Rows { kTogether, kApart };

// Processes a run of tiles, of which the caller has issued the first kStages loads, if rows lie
// together. kWide: colwise blocks have 32 or more columns; else one.
template <bool kWide, Rows kRows>
__device__ void requantize_run(const RequantizeParams& p, RequantizeStorage& s, const RowTile& at,
                               int64_t col, int tiles) {
  const int rows = clip(at.panel.rows - at.row, kTileRows);
  const int cols = static_cast<int>(min<int64_t>(p.panels.cols - col, tiles * kTileCols));
  if (p.layout == ScaleLayout::kSwizzled)
    load_swizzled_codes(p, s, at, col, cols, rows);
  else
    load_plain_codes(p, s, at, col, cols, rows);
  if constexpr (kRows == Rows::kApart) find_rows(p, s, at, rows);
  TileOut out = tile_out(p.colwise, s.colwise, at, p.panels, col);
  __syncthreads();
  const auto stage = [&](int index) {
    if (index < tiles) stage_fragment(s, col, cols, index, rows);
    __pipeline_commit();
  };
  if constexpr (kRows == Rows::kApart)
#pragma unroll
    for (int i = 0; i < kStages; ++i) stage(i);
#pragma unroll 1
  for (int index = 0; index < tiles; ++index) {
    if constexpr (kRows == Rows::kApart)
      __pipeline_wait_prior(kStages - 1);
    else
      ptx::mbarrier_wait(&s.arrived[index % kStages], index / kStages % 2);
    out.outer = min(cols - index * kTileCols, kTileCols);
    Fragment<e4m3> fragment;
    load_fragment(s, index % kStages, index, rows, fragment);
    fragment.find_unit();
    Amax<bf16> amax = fragment.columns();
    if (threadIdx.x == 0) ptx::bulk_wait_group_read<0>();
    if constexpr (kWide)
      amax_over_block(s, p.colwise.block, amax);
    else
      amax_over_columns(s, p.colwise.block, amax);
    // After the barrier in amax_over_*(), all threads have read this stage, so it can be refilled,
    // and TMA has read the previous transposed tile, so s.tile can be overwritten.
    if constexpr (kRows == Rows::kApart)
      stage(index + kStages);
    else if (threadIdx.x == 0 && index + kStages < tiles)
      load_tile(p, s, at, col, index + kStages);
    const Scales<bf16> factors(amax, p.choice);
    if (lane_index() < kWarpFragments)
      *reinterpret_cast<uint2*>(&s.col_code[warp_index() / 2][my_col()]) =
          uint2{factors.code[0], factors.code[1]};
    transpose_fragment(s.tile, rows - my_row(), fragment, factors);
    ptx::fence_proxy_async();
    __syncthreads();
    const int64_t at_col = col + index * kTileCols;
    out.stride = s.colwise.qdata_stride;
    store_transposed(p, out, s.tile, s.x + static_cast<int32_t>(at.row),
                     s.y + static_cast<int32_t>(at_col));
    store_column_scales({p.colwise, s.colwise, at_col, at.row}, out, s.col_code);
    out.qdata += kTileCols * out.stride;
  }
  if (threadIdx.x == 0) ptx::bulk_wait_group_read<0>();
}

template <bool kWide, Rows kRows>
__device__ void requantize_tiles(const RequantizeParams& p) {
  extern __shared__ __align__(alignof(RequantizeStorage)) unsigned char aligned_bytes[];
  auto& s = *reinterpret_cast<RequantizeStorage*>(aligned_bytes);
  const auto work = static_cast<uint32_t>(work_index());
  const auto all_tiles = static_cast<uint32_t>(ceil_div<int64_t>(p.panels.cols, kTileCols));
  const auto [tile, run, runs] = ending_at(p.ending, work, p.runs.count, all_tiles);
  const uint32_t length = runs == p.runs.count ? p.runs.length : 1;
  if (tile >= p.row_tiles) return;
  const int64_t col = static_cast<int64_t>(run) * length * kTileCols;
  if (threadIdx.x == 0) {
    // Prefetches to L2 while the first wave of CTAs searches for rows. The address is a guess that
    // ignores offs.
    if (kRows == Rows::kTogether && work < p.ctas_at_once)
      for (uint32_t i = 0; i < min(length, uint32_t{kStages}); ++i)
        ptx::tma_prefetch_2d(&p.qdata, static_cast<int32_t>(col + i * kTileCols),
                             static_cast<int32_t>(tile * kTileRows));
    for (uint64_t& arrived : s.arrived) ptx::mbarrier_init(&arrived, 1);
  }
  ptx::fence_mbarrier_init();
  const RowTile& at = find_row_tile(p.panels, p.alignment, tile, s.search);
  const int64_t col_tiles = ceil_div<int64_t>(p.panels.cols - col, kTileCols);
  const int tiles = static_cast<int>(min<int64_t>(col_tiles, length));
  if (kRows == Rows::kTogether && threadIdx.x == 0 && !at.tail)
    for (int i = 0; i < min(tiles, kStages); ++i) load_tile(p, s, at, col, i);
  if (threadIdx.x == kWarp) {
    s.colwise = place_of(p.panels, at.panel, Form::kColwise, p.colwise.block, p.colwise.layout);
    s.x = p.panels.weights ? 0 : static_cast<int32_t>(s.colwise.qdata);
    s.y = p.panels.weights ? static_cast<int32_t>(at.panel.index * p.panels.cols) : 0;
  }
  if (threadIdx.x == 2 * kWarp)
    s.rowwise = place_of(p.panels, at.panel, Form::kRowwise, p.block, p.layout);
  __syncthreads();
  if (!at.tail) {
    requantize_run<kWide, kRows>(p, s, at, col, tiles);
    return;
  }
  Panels mine = p.panels;
  mine.cols = min<int64_t>(mine.cols, col + tiles * kTileCols);
  zero_tail<true>(p.colwise, s.colwise, at, mine, col, kTileCols);
  const int64_t first = at.row / kTileRows;
  // Only the first CTA of each row of tiles zeroes them, because rows of tiles differ in their
  // number of CTAs (Ending).
  if (run == 0) zero_swizzled(p.colwise, s.colwise, first, p.row_tiles - (tile - first));
}

// Empty, and never launched, on GPUs without TMA.
template <bool kWide, Rows kRows>
__global__ __launch_bounds__(kThreads, kCtas) void requantize_kernel(
    const __grid_constant__ RequantizeParams p) {
  if constexpr (ptx::kHasTma) requantize_tiles<kWide, kRows>(p);
}

template <Rows kRows>
auto kernel_for(const RequantizeArgs& args) {
  return args.colwise.block.cols > 1 ? requantize_kernel<true, kRows>
                                     : requantize_kernel<false, kRows>;
}

// Whether the kernel with TMA takes these arguments; the quantizer's takes all.
bool takes(const RequantizeArgs& args, const Panels& panels) {
  const QuantizeForms forms{.offs = args.offs, .colwise = args.colwise, .rule = args.rule};
  const bool wide_scales = args.from_layout == ScaleLayout::kPlain ||
                           are_rows_aligned(args.scale.data, 0, sizeof(uint4));
  const int64_t rows = panels.total_rows(), depth = args.colwise.qdata.dim(-1),
                lines = panels.weights ? panels.count * panels.cols : panels.cols;
  // TMA coordinates are int32; the margin covers a run that ends past the tensor.
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max() - kRun * kTileCols;
  const void* const qdata = args.apart ? nullptr : args.qdata.data;
  return ptx::has_tma("requantize", requantize_kernel<true, Rows::kTogether>) &&
         are_rows_aligned(static_cast<const e4m3*>(qdata), panels.cols, kColwisePiece) &&
         are_forms_aligned(forms) && wide_scales && rows <= kMost && panels.cols <= kMost &&
         depth <= kMost && lines <= kMost && rows > 0 && panels.cols > 0;
}

}  // namespace

void requantize(const RequantizeArgs& args, const Panels& panels, void* stream) {
  const auto source =
      rowwise_source<false>(args.qdata.data, args.scale.data, args.block, args.from_layout, panels);
  if (!takes(args, panels)) {
    const QuantizeForms forms{.offs = args.offs, .colwise = args.colwise, .rule = args.rule};
    launch_quantize("requantize", forms, panels, source, stream);
    return;
  }
  const int64_t rows = panels.total_rows(), depth = args.colwise.qdata.dim(-1),
                lines = panels.weights ? panels.count * panels.cols : panels.cols;
  const int64_t alignment = args.colwise.block.rows;
  const int64_t row_tiles = num_row_tiles(panels, alignment, panels.rows);
  const int64_t col_tiles = ceil_div<int64_t>(panels.cols, kTileCols);
  // The fastest length measured: longer runs search less often, but access neighbouring memory at
  // different times.
  constexpr int64_t kLongest = 4;
  static_assert(2 * kLongest <= kRun, "want_long_runs()");
  const int64_t run =
      run_length(panels, row_tiles, col_tiles, {.longest = kLongest, .ctas_per_sm = kCtas});
  const int64_t num_runs = ceil_div(col_tiles, run);
  const int ctas_at_once = kCtas * num_multiprocessors(-1);
  // Half a wave of CTAs with single tiles, because these are a little slower than tiles of a run.
  const Ending ending =
      Ending::of(row_tiles, likely_row_tiles(panels, alignment), col_tiles, ctas_at_once / 2);
  const auto width = static_cast<uint64_t>(panels.cols), k = static_cast<uint64_t>(depth);
  RequantizeParams params{
      .qdata = {},
      .transposed =
          ptx::make_tensor_map<3>({.data = args.colwise.qdata.data,
                                   .size = {k, static_cast<uint64_t>(lines / kFragment), kFragment},
                                   .stride = {k * kFragment, k},
                                   .box = {kTileRows, kFragmentLanes, kFragment}}),
      .panels = panels,
      .scale = source.scale,
      .block = args.block,
      .layout = args.from_layout,
      .row_shift = source.row_shift,
      .col_shift = source.col_shift,
      .colwise = form_params<Form::kColwise>(args.colwise),
      .choice = choice_of(args.rule),
      .alignment = alignment,
      .row_tiles = row_tiles,
      .runs = {.count = static_cast<uint32_t>(num_runs), .length = static_cast<uint32_t>(run)},
      .ending = ending,
      .ctas_at_once = static_cast<uint32_t>(ctas_at_once),
      .apart = {}};
  if (args.apart) {
    params.apart = row_side(*args.apart, 0);
  } else {
    params.qdata = ptx::make_tensor_map<2>({.data = args.qdata.data,
                                            .size = {width, static_cast<uint64_t>(rows)},
                                            .stride = {width},
                                            .box = {kTileCols, kTileRows},
                                            .swizzle = CU_TENSOR_MAP_SWIZZLE_NONE});
  }
  launch({.op = "requantize",
          .stream = stream,
          .work = ending.work(row_tiles, num_runs, col_tiles),
          .shared_bytes = static_cast<int>(sizeof(RequantizeStorage))},
         args.apart ? kernel_for<Rows::kApart>(args) : kernel_for<Rows::kTogether>(args), params);
}

bool can_gather(const RequantizeArgs& args) {
  if (!args.apart) return false;
  const Panels panels = make_panels("requantize", args.qdata.shape, args.offs, Backend::kCuda);
  const auto& [buffer, stride, runs, index] = *args.apart;
  auto addresses = std::bit_cast<uint64_t>(buffer.data) | static_cast<uint64_t>(stride);
  for (const RowRun& run : runs) addresses |= static_cast<uint64_t>(run.begin);
  return !panels.weights && takes(args, panels) && runs.size() <= kMostRuns &&
         buffer.dim(0) >= panels.cols && addresses % sizeof(uint2) == 0;
}

}  // namespace moxie::cuda
