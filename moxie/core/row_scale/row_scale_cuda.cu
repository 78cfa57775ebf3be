// A scale covers a whole row, or a whole column of a group. Rows that fit in a CTA's registers are
// read once, by row_kernel. Everything else takes three kernels, because a scale is known only when
// all CTAs have seen their tiles; between the kernels, the scale buffers hold the amax.
#include "moxie/core/row_scale/backends.h"
#include "moxie/core/tile/group_search.cuh"
#include "moxie/core/tile/store.cuh"

namespace moxie::cuda {
namespace {

struct ScaledForm {
  bool wanted = false;
  e4m3* qdata = nullptr;
  float* scale = nullptr;
};

template <class T, bool kAligned>
struct RowScaleParams {
  Panels panels;
  FloatSource<T, kAligned> source;
  ScaledForm rowwise, colwise;
  int64_t row_tiles;
  uint32_t col_tiles;
};

template <class T, bool kAligned>
struct Position {  // of a tile
  const RowTile& at;
  TileSpan span;

  __device__ Position(const RowScaleParams<T, kAligned>& p, uint32_t tile, RowTileSearch& search)
      : at(find_row_tile(p.panels, kRowScaleAlignment, tile / p.col_tiles, search)) {
    const int64_t col = static_cast<int64_t>(tile % p.col_tiles) * kTileCols;
    span = {.row = at.row,
            .col = col,
            .rows = clip(at.panel.rows - at.row, kTileRows),
            .cols = clip(p.panels.cols - col, kTileCols)};
  }
};

// The encode factor is the reciprocal of the decode factor. Both are powers of two, or NaN.
__device__ float encode_of(float decode) {
  if (decode != decode) return decode;
  return std::bit_cast<float>((254u << 23) - std::bit_cast<uint32_t>(decode));
}

// ---- rows in registers ----

// A row takes only as many warps as have something to load: with a whole CTA per row, 2048 columns
// ran at half the speed, because most of the CTA was idle.
constexpr int kRowPieces = 4;                                 // of eight elements, per thread
constexpr int64_t kWarpRow = kRowPieces * kFragment * kWarp;  // elements
constexpr int64_t kMaxRow = kWarpRow * kWarps;
constexpr int kRounds = 8;  // rows that a CTA's threads take one after the other

template <int kRowWarps>
struct RowTeam {
  static constexpr int kSize = kRowWarps * kWarp;
  static constexpr int kPerCta = kWarps / kRowWarps;
  static constexpr int kCta = kSize * kPerCta;  // threads

  static __device__ int index() { return static_cast<int>(threadIdx.x / unsigned{kSize}); }
  static __device__ int member() { return static_cast<int>(threadIdx.x % unsigned{kSize}); }
};

template <class T>
struct RowParams {
  Panels panels;
  const T* x;
  ScaledForm out;
};

template <class T, class Team>
struct RowPieces {
  uint32_t word[kRowPieces][kFragment * sizeof(T) / 4];

  __device__ void load(const T* row, int64_t cols) {
#pragma unroll
    for (int k = 0; k < kRowPieces; ++k) {
      const int64_t col = (k * Team::kSize + Team::member()) * kFragment;
      load_row<true>(row + col, clip(cols - col, kFragment), word[k]);
    }
  }
  __device__ uint32_t amax_bits() const {  // of this thread, as the bits of an f32
    Amax<T> amax{};
#pragma unroll
    for (int k = 0; k < kRowPieces; ++k)
#pragma unroll
      for (int i = 0; i < Amax<T>::kWords; ++i)
        amax.word[i] = Amax<T>::max_of(amax.word[i], word[k][i]);
    amax.word[0] = amax.overall();
    return amax.bits(0);
  }
  __device__ void store(e4m3* row, int64_t cols, float encode) const {
#pragma unroll
    for (int k = 0; k < kRowPieces; ++k) {
      const int64_t col = (k * Team::kSize + Team::member()) * kFragment;
      float x[kFragment];
      to_floats(word[k], x);
#pragma unroll
      for (float& value : x) value *= encode;
      store_piece<true>(row + col, uint2{ptx::encode4(x), ptx::encode4(x + 4)},
                        clip(cols - col, kFragment));
    }
  }
};

template <class T, int kRowWarps>
__global__ __launch_bounds__(RowTeam<kRowWarps>::kCta, sizeof(T) == 2 ? 4 : 3) void row_kernel(
    const __grid_constant__ RowParams<T> p) {
  using Team = RowTeam<kRowWarps>;
  __shared__ RowTileSearch search;
  __shared__ uint32_t amax_bits[2][Team::kPerCta][kRowWarps];
  const int64_t cols = p.panels.cols, total = p.panels.total_rows();
  const int64_t first = work_index() * kRounds * Team::kPerCta + Team::index();
  if (first - Team::index() >= total) return;
  RowPieces<T, Team> pieces{};
  // Loads before the search for `covered`, so that the two overlap. The row may be one that no
  // group covers; its values are then not used.
  if (first < total) pieces.load(p.x + first * cols, cols);
  const int64_t covered = p.panels.offs ? end_of_groups(p.panels, p.panels.count, search) : total;
  int64_t row = first;
#pragma unroll 1
  for (int round = 0; round < kRounds; ++round, row += Team::kPerCta) {
    uint32_t most = pieces.amax_bits();
    for (int step = 1; step < kWarp; step *= 2) most = max(most, __shfl_xor_sync(~0u, most, step));
    if constexpr (kRowWarps > 1) {
      uint32_t(&shared)[kRowWarps] = amax_bits[round % 2][Team::index()];
      if (lane_index() == 0) shared[Team::member() / kWarp] = most;
      __syncthreads();
#pragma unroll
      for (int w = 0; w < kRowWarps; ++w) most = max(most, shared[w]);
    }
    if (row >= total)
      continue;  // not return: other threads of the CTA may have a row and a barrier
    const bool inside = row < covered;
    const RowScale scale = row_scale_of(std::bit_cast<float>(most));
    if (!inside) pieces = {};
    pieces.store(p.out.qdata + row * cols, cols, inside ? scale.encode : 0.f);
    if (Team::member() == 0) p.out.scale[row] = inside ? scale.decode : 0.f;
    if (round + 1 < kRounds && row + Team::kPerCta < total)
      pieces.load(p.x + (row + Team::kPerCta) * cols, cols);
  }
}

// ---- any rows, and groups ----

// Raises the amax in the scale buffer, atomically. A 0 there means "no group covers it" or "empty
// group", so an amax of 0 is stored as the bits 1, the smallest magnitude, which gives the same
// scale.
__device__ void update_amax_in_scale(float* scale, uint32_t amax) {
  atomicMax(reinterpret_cast<unsigned*>(scale), max(amax, 1u));
}

template <class T, bool kAligned>
__device__ Fragment<T> load_fragment(const RowScaleParams<T, kAligned>& p, const RowTile& at,
                                     const TileSpan& span) {
  Fragment<T> fragment[1];
  Nothing nothing;
  p.source.at_rows(p.panels, at, nothing).load(span, fragment);
  return fragment[0];
}

template <class T, bool kAligned>
__global__ __launch_bounds__(kThreads) void amax_kernel(
    const __grid_constant__ RowScaleParams<T, kAligned> p) {
  alignas(16) __shared__ Amax<T> columns[kWarps][kFragmentLanes];
  __shared__ RowTileSearch search;
  const auto tile = static_cast<uint32_t>(work_index());
  if (tile / p.col_tiles >= p.row_tiles) return;
  const Position position(p, tile, search);
  const auto& [at, span] = position;
  if (at.tail) return;
  const Fragment<T> fragment = load_fragment(p, at, span);
  if (p.rowwise.wanted) {
    Amax<T> amax = fragment.rows();
    amax_over_lanes<kFragmentLanes - 1>(amax);
    float* scale = p.rowwise.scale + at.panel.begin + span.row + fragment_row();
#pragma unroll
    for (int i = 0; i < kFragment; ++i)
      if (lane_index() % kFragmentLanes == i && fragment_row() + i < span.rows)
        update_amax_in_scale(scale + i, amax.bits(i));
  }
  if (!p.colwise.wanted) return;
  Amax<T> amax = fragment.columns();
  amax_over_lanes<kFragmentLanes>(amax);
  if (lane_index() < kFragmentLanes) columns[warp_index()][lane_index()] = amax;
  __syncthreads();
  if (threadIdx.x >= kFragmentLanes) return;
  for (int w = 1; w < kWarps; ++w) update_amax(amax, columns[w][threadIdx.x]);
  float* scale = p.colwise.scale + at.panel.index * p.panels.cols + span.col + fragment_col();
#pragma unroll
  for (int j = 0; j < kFragment; ++j)
    if (fragment_col() + j < span.cols) update_amax_in_scale(scale + j, amax.bits(j));
}

struct DecodeParams {
  float* scale;
  int64_t count;
};

__global__ __launch_bounds__(kThreads) void decode_kernel(const __grid_constant__ DecodeParams p) {
  const int64_t i = work_index() * kThreads + threadIdx.x;
  if (i < p.count && p.scale[i] != 0.f) p.scale[i] = row_scale_of(p.scale[i]).decode;
}

// Where a tile writes its part of one form. The part of a tail tile is what no group covers.
template <Form kForm, class T, bool kAligned>
__device__ TileOut tile_out(const RowScaleParams<T, kAligned>& p, const RowTile& at,
                            const TileSpan& span) {
  if constexpr (kForm == Form::kRowwise) {
    const int64_t row = at.panel.begin + span.row;
    return {.qdata = p.rowwise.qdata + row * p.panels.cols + span.col,
            .stride = p.panels.cols,
            .outer = at.tail ? clip(p.panels.rows - row, kTileRows) : span.rows,
            .k = span.cols};
  } else {
    const RowScalePlace place = colwise_place(p.panels, at.panel);
    const int64_t k = at.tail            ? place.stride - at.panel.padded
                      : p.panels.weights ? at.panel.rows
                                         : round_up<int64_t>(at.panel.rows, kRowScaleAlignment);
    return {.qdata = p.colwise.qdata + place.qdata + span.col * place.stride + span.row,
            .stride = place.stride,
            .outer = span.cols,
            .k = clip(k - span.row, kTileRows)};
  }
}

template <class T, bool kAligned>
__global__ __launch_bounds__(kThreads, sizeof(T) == 2 ? 3 : 2) void store_kernel(
    const __grid_constant__ RowScaleParams<T, kAligned> p) {
  __shared__ ByteTile bytes;
  __shared__ RowTileSearch search;
  const auto tile = static_cast<uint32_t>(work_index());
  if (tile / p.col_tiles >= p.row_tiles) return;
  const Position position(p, tile, search);
  const auto& [at, span] = position;
  const TileOut row_out = tile_out<Form::kRowwise>(p, at, span),
                col_out = tile_out<Form::kColwise>(p, at, span);
  if (at.tail) {
    if (p.rowwise.wanted) zero<kAligned, uint2>(row_out);
    if (p.colwise.wanted) zero<kAligned, uint4>(col_out);
    return;
  }
  const int row = fragment_row(), col = fragment_col();
  const Fragment<T> fragment = load_fragment(p, at, span);
  if (p.rowwise.wanted) {
#pragma unroll
    for (int i = 0; i < kFragment; ++i) {
      if (row + i >= span.rows) break;
      const float encode = encode_of(p.rowwise.scale[at.panel.begin + span.row + row + i]);
      float x[kFragment];
      fragment.row(i, x);
#pragma unroll
      for (float& value : x) value *= encode;
      store_piece<kAligned>(row_out.qdata + (row + i) * row_out.stride + col,
                            uint2{ptx::encode4(x), ptx::encode4(x + 4)}, row_out.k - col);
    }
  }
  if (!p.colwise.wanted) return;
  float encode[kFragment];
#pragma unroll
  for (int j = 0; j < kFragment; ++j) {
    const int64_t index = at.panel.index * p.panels.cols + span.col + col + j;
    encode[j] = col + j < span.cols ? encode_of(p.colwise.scale[index]) : 0.f;
  }
  transpose_rows(bytes, span.rows - fragment_row(), [&](int i, float(&x)[kFragment]) {
    fragment.row(i, x);
#pragma unroll
    for (int j = 0; j < kFragment; ++j) x[j] *= encode[j];
  });
  __syncthreads();
  store_tile<kAligned>(col_out, bytes);
}

template <class T, int kRowWarps = 1>
void launch_rows(const RowScaleArgs& args, const Panels& panels, void* stream) {
  if constexpr (kRowWarps < kWarps)
    if (panels.cols > kWarpRow * kRowWarps)
      return launch_rows<T, kRowWarps + 1>(args, panels, stream);
  using Team = RowTeam<kRowWarps>;
  const RowParams<T> params{.panels = panels,
                            .x = static_cast<const T*>(args.x.data),
                            .out = {true, args.rowwise->qdata.data, args.rowwise->scale.data}};
  const int64_t work = ceil_div<int64_t>(panels.total_rows(), kRounds * Team::kPerCta);
  launch({.op = "quantize_row_scale", .stream = stream, .work = work, .threads = Team::kCta},
         row_kernel<T, kRowWarps>, params);
}

template <class T, bool kAligned>
void launch_tiles(const RowScaleArgs& args, const Panels& panels, void* stream) {
  const auto form_of = [](const std::optional<RowScaleOut>& out) -> ScaledForm {
    if (!out) return {};
    return {true, out->qdata.data, out->scale.data};
  };
  // At least one tile, because rows without columns have scales too.
  const int64_t col_tiles = max<int64_t>(ceil_div<int64_t>(panels.cols, kTileCols), 1);
  const RowScaleParams<T, kAligned> params{
      .panels = panels,
      .source = {{}, static_cast<const T*>(args.x.data), panels.cols},
      .rowwise = form_of(args.rowwise),
      .colwise = form_of(args.colwise),
      .row_tiles = num_row_tiles(panels, kRowScaleAlignment, panels.rows),
      .col_tiles = static_cast<uint32_t>(col_tiles)};
  const Launch how{
      .op = "quantize_row_scale", .stream = stream, .work = params.row_tiles * col_tiles};
  for (const auto& out : {args.rowwise, args.colwise})
    if (out) zero_async(how, out->scale.data, numel(out->scale.shape) * sizeof(float));
  launch(how, amax_kernel<T, kAligned>, params);
  for (const auto& out : {args.rowwise, args.colwise}) {
    if (!out) continue;
    const DecodeParams decode{.scale = out->scale.data, .count = numel(out->scale.shape)};
    launch({how.op, stream, ceil_div<int64_t>(decode.count, kThreads)}, decode_kernel, decode);
  }
  launch(how, store_kernel<T, kAligned>, params);
}

}  // namespace

void quantize_row_scale(const RowScaleArgs& args, const Panels& panels, void* stream) {
  with_format(args.x.format, [&]<class T>() {
    const bool aligned =
        are_rows_aligned(static_cast<const T*>(args.x.data), panels.cols, kFragment) &&
        are_rows_aligned(args.rowwise, kRowwisePiece) &&
        are_rows_aligned(args.colwise, kColwisePiece);
    if (aligned && !args.colwise && panels.cols <= kMaxRow)
      return launch_rows<T>(args, panels, stream);
    with_alignment(aligned,
                   [&]<bool kAligned>() { launch_tiles<T, kAligned>(args, panels, stream); });
  });
}

}  // namespace moxie::cuda
