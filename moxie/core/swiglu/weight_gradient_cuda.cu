#include "moxie/core/swiglu/weight_gradient.cuh"
#include "moxie/core/swiglu/weights.cuh"
#include "moxie/core/tile/covered_rows.cuh"
#include "moxie/core/tile/source.cuh"

namespace moxie::cuda {
namespace {

template <class T>
struct DotParams {
  const T *da, *h;
  WeightParams of;
  float* dweights;
  int64_t width;
  CoveredRows covered;
};

// Half a warp per row: a lane has eight columns of every tile.
template <class Glu, bool kAligned>
__global__ __launch_bounds__(kThreads) void dot_kernel(
    const __grid_constant__ DotParams<ElementOf<Glu>> p) {
  using T = ElementOf<Glu>;
  const int64_t row = work_index() * (kThreads / kFragmentLanes) + threadIdx.x / kFragmentLanes;
  // Lanes without a row stay for the shuffles and repeat the last row.
  const int64_t mine = min<int64_t>(row, p.of.rows - 1);
  const T *da = p.da + mine * p.width, *gate = p.h + mine * 2 * p.width, *up = gate + p.width;
  float sum = 0;
#pragma unroll 1
  for (int64_t col = fragment_col(); col < align_up(p.width, int64_t{kTileCols});
       col += kTileCols) {
    const int left = clip(p.width - col, kFragment);
    RowWords<T> d, g, u;
    load_row<kAligned>(da + col, left, d);
    load_row<kAligned>(gate + col, left, g);
    load_row<kAligned>(up + col, left, u);
    float tile = dot_piece<Glu>(d, g, u);
#pragma unroll
    for (int step = kFragmentLanes / 2; step > 0; step /= 2)
      tile = __fadd_rn(tile, __shfl_xor_sync(~0u, tile, step));
    sum = __fadd_rn(sum, tile);
  }
  const int64_t covered = p.covered.count();
  if (fragment_col() == 0 && row < p.of.rows)
    p.dweights[p.of.slot(row)] = row < covered ? sum : 0.f;
}

struct TileSumParams {
  const float* tiles;  // [rows, count]; rows that no group covers hold anything
  WeightParams of;
  float* dweights;
  int64_t count;
  CoveredRows covered;
};

__global__ __launch_bounds__(kThreads) void tile_sum_kernel(
    const __grid_constant__ TileSumParams p) {
  const int64_t row = work_index() * kThreads + threadIdx.x;
  const int64_t covered = p.covered.count(), count = row < covered ? p.count : 0;
  if (row >= p.of.rows) return;
  float sum = 0;
  for (int64_t i = 0; i < count; ++i) sum = __fadd_rn(sum, p.tiles[row * p.count + i]);
  p.dweights[p.of.slot(row)] = sum;
}

}  // namespace

void weight_gradient(const char* op, const WeightGradientArgs& args, void* stream) {
  const auto& [to, da, h, activation, offs] = args;
  with_glu(h.format, activation, [&]<class Glu>() {
    using T = ElementOf<Glu>;
    const DotParams<T> params{.da = static_cast<const T*>(da.data),
                              .h = static_cast<const T*>(h.data),
                              .of = weight_params(to.of),
                              .dweights = to.dweights.data,
                              .width = da.dim(1),
                              .covered = CoveredRows(offs, da.dim(0))};
    const bool aligned = are_rows_aligned(params.da, params.width, kFragment) &&
                         are_rows_aligned(params.h, params.width, kFragment);
    with_alignment(aligned, [&]<bool kAligned>() {
      launch({op, stream, ceil_div<int64_t>(params.of.rows, kThreads / kFragmentLanes)},
             dot_kernel<Glu, kAligned>, params);
    });
  });
}

void sum_weight_tiles(const char* op, const WeightGradient& to, const OptionalOffs& offs,
                      void* stream) {
  const TileSumParams params{.tiles = to.workspace.data,
                             .of = weight_params(to.of),
                             .dweights = to.dweights.data,
                             .count = to.workspace.dim(1),
                             .covered = CoveredRows(offs, to.workspace.dim(0))};
  launch({op, stream, ceil_div<int64_t>(params.of.rows, kThreads)}, tile_sum_kernel, params);
}

}  // namespace moxie::cuda
