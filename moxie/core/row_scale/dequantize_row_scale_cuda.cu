#include "moxie/core/base/cuda.cuh"
#include "moxie/core/row_scale/backends.h"
#include "moxie/core/tile/group_search.cuh"

namespace moxie::cuda {
namespace {

constexpr int kCols = 64;

struct DecodeParams {
  DequantizeRowScaleArgs args;
  Panels panels;
  int64_t alignment, col_tiles, tiles;
};

__device__ void put(float* to, float value) { *to = value; }
// Uses to_bf16(), because the conversion instruction gives NaN other bits.
__device__ void put(bf16* to, float value) { *to = to_bf16(value); }

// One CTA per 128 rows and 64 columns of x. The colwise form is transposed through shared memory.
template <class T>
__global__ __launch_bounds__(kThreads) void decode_kernel(const __grid_constant__ DecodeParams p) {
  __shared__ RowTileSearch search;
  __shared__ e4m3 transposed[kTileRows][kCols + 4];
  const int64_t tile = work_index();
  if (tile >= p.tiles) return;
  const int64_t col0 = tile % p.col_tiles * kCols;
  const RowTile& at = find_row_tile(p.panels, p.alignment, tile / p.col_tiles, search);
  const bool rowwise = p.args.form == Form::kRowwise;
  const int64_t cols = p.panels.cols, begin = at.panel.begin;
  const int64_t end = at.tail ? p.panels.rows - begin : at.panel.rows;
  const int thread = static_cast<int>(threadIdx.x);
  if (!rowwise && !at.tail) {
    const int64_t stride = p.args.qdata.dim(-1);
    const e4m3* q =
        p.args.qdata.data + (p.panels.weights ? at.panel.index * cols * stride : at.panel.padded);
    for (int i = thread; i < kTileRows * kCols; i += kThreads) {
      const int r = i % kTileRows, c = i / kTileRows;
      if (at.row + r < end && col0 + c < cols)
        transposed[r][c] = q[(col0 + c) * stride + at.row + r];
    }
    __syncthreads();
  }
  T* const x = static_cast<T*>(p.args.x.data);
  for (int i = thread; i < kTileRows * kCols; i += kThreads) {
    const int r = i / kCols, c = i % kCols;
    const int64_t row = at.row + r, col = col0 + c;
    if (row >= end || col >= cols) continue;
    const int64_t to = (begin + row) * cols + col;
    float value = 0;
    if (!at.tail) {
      const float scale =
          rowwise ? p.args.scale.data[begin + row] : p.args.scale.data[at.panel.index * cols + col];
      value = to_float(rowwise ? p.args.qdata.data[to] : transposed[r][c]) * scale;
      // Canonical NaN: a GPU's product gives NaN other bits than a CPU's.
      if (value != value) value = __uint_as_float(0x7fc00000);
    }
    put(x + to, value);
  }
}

}  // namespace

void dequantize_row_scale(const DequantizeRowScaleArgs& args, const Panels& panels, void* stream) {
  DecodeParams params{.args = args,
                      .panels = panels,
                      .alignment = args.form == Form::kColwise ? kRowScaleAlignment : 1,
                      .col_tiles = ceil_div<int64_t>(panels.cols, kCols),
                      .tiles = 0};
  params.tiles = num_row_tiles(panels, params.alignment, panels.rows) * params.col_tiles;
  launch({"dequantize_row_scale", stream, params.tiles},
         args.x.format == Format::kF32 ? decode_kernel<float> : decode_kernel<bf16>, params);
}

}  // namespace moxie::cuda
