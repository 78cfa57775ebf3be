// A simple GEMM: one CTA per 128 x 64 of the result, 8 x 4 elements per thread, f32 arithmetic.
#include <cuda_bf16.h>

#include "moxie/core/base/cuda.cuh"
#include "moxie/core/gemm/backends.h"
#include "moxie/core/tile/group_search.cuh"

namespace moxie::cuda {
namespace {

constexpr int kTileCols = 64;
constexpr int kTileK = 16;                   // 12 KB of shared memory in f32
constexpr int kRowsEach = 8, kColsEach = 4;  // per thread: (128 / 8) * (64 / 4) threads
static_assert(kTileRows / kRowsEach * (kTileCols / kColsEach) == kThreads);

// An operand as [outer, k] with strides: k may be its rows or its columns.
template <class T>
struct Strided {
  const T* data;
  int64_t outer_stride, k_stride;

  __device__ float at(int64_t outer, int64_t k) const {
    return static_cast<float>(data[outer * outer_stride + k * k_stride]);
  }
};

struct Storage {
  float a[kTileK][kTileRows + 4];  // + 4: spreads a column over the banks
  float b[kTileK][kTileCols + 4];
};

template <class T>
struct ProductParams {
  Pass pass;
  Panels panels;  // rows of a
  const T *a, *b;
  int64_t a_cols, b_cols;  // columns of a and of b
  int64_t m, n;            // rows (wgrad only) and columns of a result
  ConstFloatView bias;     // data may be nullptr
  void* out;
  bool out_f32, add;
  int64_t col_tiles, row_tiles, tiles;
};

// sum += a [rows, k] * b [cols, k]^T; elements outside count as 0.
template <class T>
__device__ void multiply(const Strided<T>& a, int64_t rows, const Strided<T>& b, int64_t cols,
                         int64_t k_end, Storage& s, float (&sum)[kRowsEach][kColsEach]) {
  const int thread = static_cast<int>(threadIdx.x);
  const int row = thread / (kTileCols / kColsEach) * kRowsEach;
  const int col = thread % (kTileCols / kColsEach) * kColsEach;
  for (int64_t k = 0; k < k_end; k += kTileK) {
    // Coalesced for both orientations: neighbouring threads read along the contiguous dimension.
    for (int i = thread; i < kTileRows * kTileK; i += kThreads) {
      const bool k_first = a.k_stride == 1;
      const int r = k_first ? i / kTileK : i % kTileRows, dk = k_first ? i % kTileK : i / kTileRows;
      s.a[dk][r] = r < rows && k + dk < k_end ? a.at(r, k + dk) : 0.f;
    }
    for (int i = thread; i < kTileCols * kTileK; i += kThreads) {
      const bool k_first = b.k_stride == 1;
      const int c = k_first ? i / kTileK : i % kTileCols, dk = k_first ? i % kTileK : i / kTileCols;
      s.b[dk][c] = c < cols && k + dk < k_end ? b.at(c, k + dk) : 0.f;
    }
    __syncthreads();
#pragma unroll
    for (int dk = 0; dk < kTileK; ++dk)
#pragma unroll
      for (int i = 0; i < kRowsEach; ++i)
#pragma unroll
        for (int j = 0; j < kColsEach; ++j) sum[i][j] += s.a[dk][row + i] * s.b[dk][col + j];
    __syncthreads();
  }
}

__device__ float at(const ConstFloatView& x, int64_t i) {
  return x.format == Format::kF32
             ? static_cast<const float*>(x.data)[i]
             : static_cast<float>(static_cast<const __nv_bfloat16*>(x.data)[i]);
}

__device__ float bias_at(const ConstFloatView& bias, int64_t g, int64_t cols, int64_t col) {
  return at(bias, bias.shape.dims == 2 ? g * cols + col : col);
}

template <class T>
__device__ void put(const ProductParams<T>& p, int64_t i, float value) {
  if (!p.out_f32) {
    static_cast<__nv_bfloat16*>(p.out)[i] = __float2bfloat16(value);
    return;
  }
  float& to = static_cast<float*>(p.out)[i];
  to = p.add ? to + value : value;
}

template <class T>
__global__ __launch_bounds__(kThreads) void product_kernel(
    const __grid_constant__ ProductParams<T> p) {
  __shared__ RowTileSearch search;
  __shared__ Storage storage;
  const int64_t tile = work_index();
  if (tile >= p.tiles) return;
  const int64_t col0 = tile % p.col_tiles * kTileCols, above = tile / p.col_tiles;
  const int64_t cols = min<int64_t>(kTileCols, p.n - col0);
  float sum[kRowsEach][kColsEach] = {};
  int64_t g, row0, rows, out_row0;

  if (p.pass == Pass::kWgrad) {
    g = above / p.row_tiles;
    row0 = above % p.row_tiles * kTileRows;
    rows = min<int64_t>(kTileRows, p.m - row0);
    out_row0 = g * p.m + row0;
    int64_t begin = 0, end = p.panels.rows;
    if (p.panels.offs) {
      begin = end_of_groups(p.panels, g, search);
      end = group_end(p.panels.offs[g], begin, p.panels.rows);
    }
    multiply<T>({p.a + begin * p.a_cols + row0, 1, p.a_cols}, rows,
                {p.b + begin * p.b_cols + col0, 1, p.b_cols}, cols, end - begin, storage, sum);
  } else {
    const RowTile& at = find_row_tile(p.panels, 1, above, search);
    g = at.panel.index;
    out_row0 = at.panel.begin + at.row;
    const int64_t end = at.tail ? p.panels.rows : at.panel.begin + at.panel.rows;
    rows = min<int64_t>(kTileRows, end - out_row0);
    if (rows <= 0) return;
    if (!at.tail) {
      const bool forward = p.pass == Pass::kForward;
      // b [G, n, k]: forward contracts its last dimension, dgrad its middle one.
      const int64_t first = g * (forward ? p.n * p.a_cols : p.a_cols * p.n);
      const Strided<T> b = forward ? Strided<T>{p.b + first + col0 * p.a_cols, p.a_cols, 1}
                                   : Strided<T>{p.b + first + col0, 1, p.n};
      multiply<T>({p.a + out_row0 * p.a_cols, p.a_cols, 1}, rows, b, cols, p.a_cols, storage, sum);
    } else {
      g = -1;
    }
  }

  const int thread = static_cast<int>(threadIdx.x);
  const int row = thread / (kTileCols / kColsEach) * kRowsEach;
  const int col = thread % (kTileCols / kColsEach) * kColsEach;
  for (int i = 0; i < kRowsEach; ++i)
    for (int j = 0; j < kColsEach; ++j)
      if (row + i < rows && col + j < cols) {
        const bool biased = p.bias.data && g >= 0;
        const float bias = biased ? bias_at(p.bias, g, p.n, col0 + col + j) : 0.f;
        put(p, (out_row0 + row + i) * p.n + col0 + col + j, sum[i][j] + bias);
      }
}

struct FinishParams {
  FinishRowsArgs args;
  Panels panels;
  int64_t tiles;
};

template <class T>
__global__ __launch_bounds__(kThreads) void finish_rows_kernel(
    const __grid_constant__ FinishParams p) {
  __shared__ RowTileSearch search;
  const int64_t tile = work_index();
  if (tile >= p.tiles) return;
  const RowTile& found = find_row_tile(p.panels, 1, tile, search);
  if (!found.tail && !p.args.bias) return;
  const int64_t cols = p.panels.cols, first = found.panel.begin + found.row;
  const int64_t end = found.tail ? p.panels.rows : found.panel.begin + found.panel.rows;
  const int64_t last = min<int64_t>(first + kTileRows, end);
  for (int64_t i = first * cols + threadIdx.x; i < last * cols; i += kThreads) {
    T& to = static_cast<T*>(p.args.out.data)[i];
    if (found.tail)
      to = T(0.f);
    else
      to = T(static_cast<float>(to) + bias_at(*p.args.bias, found.panel.index, cols, i % cols));
  }
}

template <class T>
void launch_product(const ProductArgs& args, const Panels& panels, void* stream) {
  const bool wgrad = args.pass == Pass::kWgrad;
  ProductParams<T> params{.pass = args.pass,
                          .panels = panels,
                          .a = static_cast<const T*>(args.a.data),
                          .b = static_cast<const T*>(args.b.data),
                          .a_cols = args.a.dim(1),
                          .b_cols = args.b.dim(-1),
                          .m = wgrad ? args.a.dim(1) : 0,
                          .n = args.out.dim(-1),
                          .bias = args.bias.value_or(ConstFloatView{}),
                          .out = args.out.data,
                          .out_f32 = args.out.format == Format::kF32,
                          .add = args.sum == Sum::kAdd,
                          .col_tiles = 0,
                          .row_tiles = 0,
                          .tiles = 0};
  params.col_tiles = ceil_div<int64_t>(params.n, kTileCols);
  params.row_tiles = wgrad ? ceil_div<int64_t>(params.m, kTileRows) * panels.count
                           : num_row_tiles(panels, 1, panels.rows);
  params.tiles = params.row_tiles * params.col_tiles;
  // Until here row_tiles counts all groups; the kernel takes the number per group.
  if (wgrad) params.row_tiles /= max<int64_t>(panels.count, 1);
  launch({"product", stream, params.tiles}, product_kernel<T>, params);
}

}  // namespace

void product(const ProductArgs& args, const Panels& panels, void* stream) {
  if (args.a.format == Format::kF32)
    launch_product<float>(args, panels, stream);
  else
    launch_product<__nv_bfloat16>(args, panels, stream);
}

void finish_rows(const FinishRowsArgs& args, const Panels& panels, void* stream) {
  const FinishParams params{
      .args = args, .panels = panels, .tiles = num_row_tiles(panels, 1, panels.rows)};
  launch({"finish_rows", stream, params.tiles},
         args.out.format == Format::kF32 ? finish_rows_kernel<float>
                                         : finish_rows_kernel<__nv_bfloat16>,
         params);
}

}  // namespace moxie::cuda
