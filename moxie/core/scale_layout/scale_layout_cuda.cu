#include "moxie/core/layout/panel.cuh"
#include "moxie/core/scale_layout/backends.h"

namespace moxie::cuda {
namespace {

// ---- plain <-> swizzled ----

enum class Direction : uint8_t { kSwizzle, kUnswizzle };

constexpr int kSwizzleCols = 128;  // of the panel, per CTA

struct SwizzleParams {
  Panels panels;
  Form form;
  const e8m0* from;
  e8m0* to;
  int64_t col_tiles, tiles;
};

template <Direction kDirection>
__global__ __launch_bounds__(kThreads) void swizzle_kernel(
    const __grid_constant__ SwizzleParams p) {
  __shared__ RowTileSearch search;
  const int64_t tile = work_index();
  if (tile >= p.tiles) return;
  const RowTile& at = find_row_tile(p.panels, kScaleTileCols, tile / p.col_tiles, search);
  if (at.tail) return;  // zero already
  const SwizzleRun run = swizzle_run(p.panels, at.panel, p.form);
  const bool rowwise = p.form == Form::kRowwise;
  const int64_t col = tile % p.col_tiles * kSwizzleCols;
  // What is contiguous in the plain matrix is what neighbouring threads take. Panels run along
  // rows of a rowwise matrix and along columns of a colwise one.
  const int64_t first_row = rowwise ? at.row : col, first_col = rowwise ? col : at.row;
  static_assert(kTileRows == kSwizzleCols);
  for (int i = threadIdx.x; i < kTileRows * kSwizzleCols; i += kThreads) {
    const int64_t r = first_row + i / kSwizzleCols, c = first_col + i % kSwizzleCols;
    if (r >= run.rows || c >= run.cols) continue;
    const int64_t plain = run.plain + r * run.plain_stride + c;
    const int64_t swizzled = run.swizzled + swizzled_index(r, c, run.tiles_per_row);
    if constexpr (kDirection == Direction::kSwizzle)
      p.to[swizzled] = p.from[plain];
    else
      p.to[plain] = p.from[swizzled];
  }
}

struct Swizzle {
  std::string_view op;
  View<const e8m0> from;
  View<e8m0> to;
  Form form;
};

template <Direction kDirection>
void launch_swizzle(const Swizzle& swizzle, const Panels& panels, void* stream) {
  SwizzleParams params{.panels = panels,
                       .form = swizzle.form,
                       .from = swizzle.from.data,
                       .to = swizzle.to.data,
                       .col_tiles = ceil_div<int64_t>(panels.cols, kSwizzleCols),
                       .tiles = 0};
  params.tiles = num_row_tiles(panels, kScaleTileCols, panels.rows) * params.col_tiles;
  const Launch how{.op = swizzle.op, .stream = stream, .work = params.tiles};
  zero_async(how, swizzle.to.data, numel(swizzle.to.shape));
  launch(how, swizzle_kernel<kDirection>, params);
}

// ---- compact <-> replicated ----

struct ReplicaParams {
  const e8m0* from;
  e8m0* to;
  int64_t outer, cols;                  // of one replicated matrix
  int64_t compact_outer, compact_cols;  // of one compact matrix
  int64_t outer_block, k_block;
  int64_t count;  // elements of the result
};

__global__ __launch_bounds__(kThreads) void replicate_kernel(
    const __grid_constant__ ReplicaParams p) {
  const int64_t i = work_index() * kThreads + threadIdx.x;
  if (i >= p.count) return;
  const int64_t stack = i / (p.outer * p.cols), row = i / p.cols % p.outer, col = i % p.cols;
  p.to[i] =
      p.from[(stack * p.compact_outer + row / p.outer_block) * p.compact_cols + col / p.k_block];
}

__global__ __launch_bounds__(kThreads) void compact_kernel(
    const __grid_constant__ ReplicaParams p) {
  const int64_t i = work_index() * kThreads + threadIdx.x;
  if (i >= p.count) return;
  const int64_t stack = i / (p.compact_outer * p.compact_cols);
  const int64_t row = i / p.compact_cols % p.compact_outer, col = i % p.compact_cols;
  p.to[i] = p.from[(stack * p.outer + row * p.outer_block) * p.cols + col * p.k_block];
}

ReplicaParams replica_params(const Shape& replicated, const Shape& compact, Form form,
                             Block block) {
  return {.from = nullptr,
          .to = nullptr,
          .outer = replicated.dim(-2),
          .cols = replicated.dim(-1),
          .compact_outer = compact.dim(-2),
          .compact_cols = compact.dim(-1),
          .outer_block = outer_of(block, form),
          .k_block = k_of(block, form) / kMxBlock,
          .count = 0};
}

}  // namespace

void swizzle_scale(const SwizzleArgs& args, const Panels& panels, void* stream) {
  launch_swizzle<Direction::kSwizzle>(
      {.op = "swizzle_scale", .from = args.plain, .to = args.swizzled, .form = args.form}, panels,
      stream);
}

void unswizzle_scale(const UnswizzleArgs& args, const Panels& panels, void* stream) {
  launch_swizzle<Direction::kUnswizzle>(
      {.op = "unswizzle_scale", .from = args.swizzled, .to = args.plain, .form = args.form}, panels,
      stream);
}

void replicate_scale(const ReplicateArgs& args, void* stream) {
  auto params = replica_params(args.replicated.shape, args.compact.shape, args.form, args.block);
  params.from = args.compact.data;
  params.to = args.replicated.data;
  params.count = numel(args.replicated.shape);
  launch({"replicate_scale", stream, ceil_div<int64_t>(params.count, kThreads)}, replicate_kernel,
         params);
}

void compact_scale(const CompactArgs& args, void* stream) {
  auto params = replica_params(args.replicated.shape, args.compact.shape, args.form, args.block);
  params.from = args.replicated.data;
  params.to = args.compact.data;
  params.count = numel(args.compact.shape);
  launch({"compact_scale", stream, ceil_div<int64_t>(params.count, kThreads)}, compact_kernel,
         params);
}

}  // namespace moxie::cuda
