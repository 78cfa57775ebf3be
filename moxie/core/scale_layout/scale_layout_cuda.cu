#include "moxie/core/scale_layout/backends.h"
#include "moxie/core/tile/group_search.cuh"
#include "moxie/core/tile/zero.cuh"

namespace moxie::cuda {
namespace {

// ---- plain <-> swizzled ----

enum class Direction : uint8_t { kSwizzle, kUnswizzle };

constexpr int kSwizzleCols = 128;  // columns of the panel per CTA
constexpr int kWide = sizeof(uint4);
constexpr int kRowChunks = kSwizzleCols / kWide;
static_assert(kTileRows == kSwizzleCols && kRowChunks == kWarps);

struct SwizzleParams {
  Panels panels;
  Form form;
  const e8m0* from;
  e8m0* to;
  int64_t from_bytes, to_bytes, row_tiles;
  uint32_t runs;  // CTAs of kSwizzleCols columns in a row of tiles
};

// Holds rows of plain scales, each from the 16-byte boundary before its first scale on. The pitch
// is an odd number of words, so that both access patterns (four rows of eight chunks; one word of
// 32 rows) are free of bank conflicts.
struct SwizzleStorage {
  static constexpr int kPitch = 41;
  static constexpr int kMargin = 4;  // words in front of a row, for unswizzle_tile()
  uint32_t word[kTileRows][kPitch];
  RowTileSearch search;
};

// The 128 x 128 scales of a CTA.
struct SwizzleTile {
  SwizzleRun run;
  int64_t row, col;
  int rows, cols;  // inside the run; at most 128

  // Bytes from the 16-byte boundary before row r to the row's first scale.
  __device__ int shift(const e8m0* plain, int r) const {
    return static_cast<int>(reinterpret_cast<uintptr_t>(at(plain, r)) % kWide);
  }
  template <class T>
  __device__ T* at(T* plain, int r) const {
    return plain + run.plain + (row + r) * run.plain_stride + col;
  }
  // Index of this lane's 16 bytes in the first of the four swizzled tiles that hold the 16 columns
  // of chunk `index`.
  __device__ int64_t swizzled(int index, int lane) const {
    return run.swizzled + swizzled_index(row, col + index * kWide, run.tiles_per_row) +
           lane * kWide;
  }
  __device__ bool has_tile(int64_t column) const {
    return (col + column) / kScaleTileCols < run.tiles_per_row;
  }
};

// Reads 16 bytes of a row in shared memory, from byte `first` on.
__device__ uint4 read_row(const uint32_t (&row)[SwizzleStorage::kPitch], int first) {
  uint32_t word[5], out[4];
#pragma unroll
  for (int i = 0; i < 5; ++i) word[i] = row[first / 4 + i];
#pragma unroll
  for (int i = 0; i < 4; ++i) out[i] = __funnelshift_r(word[i], word[i + 1], first % 4 * 8);
  return {out[0], out[1], out[2], out[3]};
}

// Loads bytes [first, last) of the 16 at `at`; the others are 0.
__device__ uint4 load_wide(const e8m0* at, int first, int last) {
  if (first <= 0 && last >= kWide && reinterpret_cast<uintptr_t>(at) % kWide == 0)
    return *reinterpret_cast<const uint4*>(at);
  uint32_t word[4] = {};
#pragma unroll
  for (int i = 0; i < kWide; ++i)
    if (i >= first && i < last) word[i / 4] |= static_cast<uint32_t>(at[i].code) << 8 * (i % 4);
  return {word[0], word[1], word[2], word[3]};
}
__device__ void store_wide(e8m0* at, const uint4& value, int first, int last) {
  first = max(first, 0), last = min(last, kWide);
  if (first >= last) return;
  const bool aligned = reinterpret_cast<uintptr_t>(at) % kWide == 0;
  if (first == 0 && last == kWide && aligned) {
    *reinterpret_cast<uint4*>(at) = value;
    return;
  }
  // Up to four stores of 1, 2, 4 and 8 bytes if one end is aligned; else byte by byte.
  const uint64_t low = value.x | static_cast<uint64_t>(value.y) << 32,
                 high = value.z | static_cast<uint64_t>(value.w) << 32;
  const auto bytes_at = [&](int i) {
    if (i >= 8) return high >> 8 * (i - 8);
    return i == 0 ? low : low >> 8 * i | high << (64 - 8 * i);
  };
  const auto store = [&]<class Word>(Word, int i) {
    *reinterpret_cast<Word*>(at + i) = static_cast<Word>(bytes_at(i));
  };
  if (aligned && last == kWide) {
    int i = first;
    if (i & 1) {
      store(uint8_t{}, i);
      i += 1;
    }
    if (i & 2) {
      store(uint16_t{}, i);
      i += 2;
    }
    if (i & 4) {
      store(uint32_t{}, i);
      i += 4;
    }
    if (i & 8) store(uint64_t{}, i);
  } else if (aligned && first == 0) {
    if (last & 8) store(uint64_t{}, 0);
    if (last & 4) store(uint32_t{}, last & 8);
    if (last & 2) store(uint16_t{}, last & 12);
    if (last & 1) store(uint8_t{}, last & 14);
  } else {
    for (int i = first; i < last; ++i) store(uint8_t{}, i);
  }
}

// for_each_row_chunk() calls f(i, row, chunk) for a thread's chunks of 16 bytes: neighbouring
// threads have the first eight chunks of a row. A row that is not aligned has a ninth, which comes
// last.
constexpr int kMyChunks = kTileRows * kRowChunks / kThreads + 1;

template <class F>
__device__ void for_each_row_chunk(F&& f) {
#pragma unroll
  for (int i = 0; i < kMyChunks - 1; ++i)
    f(i, static_cast<int>(threadIdx.x / unsigned{kRowChunks}) + i * (kThreads / kRowChunks),
      static_cast<int>(threadIdx.x % unsigned{kRowChunks}));
  if (threadIdx.x < kTileRows) f(kMyChunks - 1, static_cast<int>(threadIdx.x), kRowChunks);
}

__device__ void swizzle_tile(const SwizzleParams& p, SwizzleStorage& s, const SwizzleTile& tile) {
  // All loads are issued before the first store, so that none waits for another.
  uint4 four[kMyChunks] = {};
  for_each_row_chunk([&](int i, int r, int index) {
    const int first = index * kWide - tile.shift(p.from, r);
    if (r >= tile.rows || first >= tile.cols) return;
    // Reads all 16 bytes if they are inside the tensor, even if some belong to a neighbouring row.
    const e8m0* from = tile.at(p.from, r) + first;
    const bool whole = from >= p.from && from + kWide <= p.from + p.from_bytes;
    four[i] = load_wide(from, whole ? 0 : -first, whole ? kWide : tile.cols - first);
  });
  for_each_row_chunk([&](int i, int r, int index) {
    uint32_t* to = &s.word[r][index * 4];
    to[0] = four[i].x;
    to[1] = four[i].y;
    to[2] = four[i].z;
    to[3] = four[i].w;
  });
  __syncthreads();
  const int index = warp_index(), lane = lane_index();
  uint32_t word[4][4];  // [rows 32 apart][tiles]
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const int r = lane + k * kWarp;
    const uint4 four = read_row(s.word[r], tile.shift(p.from, r) + index * kWide);
    const uint32_t all[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int left = r < tile.rows ? tile.cols - index * kWide - i * 4 : 0;
      word[k][i] = left >= 4 ? all[i] : left <= 0 ? 0 : all[i] & ((1u << 8 * left) - 1);
    }
  }
  e8m0* to = p.to + tile.swizzled(index, lane);
#pragma unroll
  for (int i = 0; i < 4; ++i)
    if (tile.has_tile(index * kWide + i * kScaleTileCols))
      store_wide(to + i * kScaleTileBytes, {word[0][i], word[1][i], word[2][i], word[3][i]}, 0,
                 kWide);
}

// Rows of the plain matrix are stored in aligned chunks of 16 bytes. A chunk that two tiles share
// is stored by the second, which reads the last columns of the first for it.
__device__ void unswizzle_tile(const SwizzleParams& p, SwizzleStorage& s, const SwizzleTile& tile) {
  const int lane = lane_index();
  const bool is_first = tile.col == 0, is_last = tile.col + kSwizzleCols >= tile.run.cols;
  uint4 four[2][4] = {};
  const auto load = [&](int index, uint4(&to)[4]) {
    const e8m0* from = p.from + tile.swizzled(index, lane);
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (tile.has_tile(index * kWide + i * kScaleTileCols))
        to[i] = load_wide(from + i * kScaleTileBytes, 0, kWide);
  };
  const auto put = [&](int index, const uint4(&from)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at = SwizzleStorage::kMargin + index * 4 + i;
      s.word[lane][at] = from[i].x, s.word[lane + kWarp][at] = from[i].y;
      s.word[lane + 2 * kWarp][at] = from[i].z, s.word[lane + 3 * kWarp][at] = from[i].w;
    }
  };
  const bool before = !is_first && warp_index() == 0;
  load(warp_index(), four[0]);
  if (before) load(-1, four[1]);
  put(warp_index(), four[0]);
  if (before) put(-1, four[1]);
  __syncthreads();
  for_each_row_chunk([&](int, int r, int index) {
    const int first = index * kWide - tile.shift(p.to, r);
    if (r >= tile.rows || first >= tile.cols || (index == kRowChunks && !is_last)) return;
    const uint4 row = read_row(s.word[r], SwizzleStorage::kMargin * 4 + first);
    store_wide(tile.at(p.to, r) + first, row, is_first ? -first : 0, tile.cols - first);
  });
}

// Zeroes what no group covers: a range of bytes, which the CTAs of the tail share; in a plain
// colwise matrix, columns.
template <Direction kDirection>
__device__ void zero_tail(const SwizzleParams& p, const RowTile& at, uint32_t index,
                          uint32_t count) {
  const SwizzleRun run = swizzle_run(p.panels, at.panel, p.form);
  if (kDirection == Direction::kSwizzle || p.form == Form::kRowwise) {
    const int64_t begin = kDirection == Direction::kSwizzle ? run.swizzled : run.plain;
    zero_share(p.to + begin, p.to_bytes - begin, index, count);
    return;
  }
  const int64_t left = p.panels.rows - at.panel.begin - at.row;
  const int64_t first = index % p.runs * kSwizzleCols;
  for (int i = threadIdx.x; i < kTileRows * kSwizzleCols; i += kThreads) {
    const int64_t r = first + i / kTileRows, c = i % kTileRows;
    if (r < run.rows && c < left) p.to[run.plain + r * run.plain_stride + at.row + c] = {};
  }
}

// Six CTAs per SM leave 40 registers per thread; without these launch bounds the compiler uses 60.
template <Direction kDirection>
__global__ __launch_bounds__(kThreads,
                             6) void swizzle_kernel(const __grid_constant__ SwizzleParams p) {
  __shared__ SwizzleStorage s;
  const auto work = static_cast<uint32_t>(work_index());
  const uint32_t row_tile = work / p.runs, index = work % p.runs;
  if (row_tile >= p.row_tiles) return;
  const RowTile& at = find_row_tile(p.panels, kScaleTileCols, row_tile, s.search);
  if (at.tail) {
    const auto first = static_cast<uint32_t>(at.row / kTileRows);
    const auto tiles = static_cast<uint32_t>(p.row_tiles) - (row_tile - first);
    return zero_tail<kDirection>(p, at, first * p.runs + index, tiles * p.runs);
  }
  // Panels divide the rows of a rowwise matrix, and the columns of a colwise one.
  const bool rowwise = p.form == Form::kRowwise;
  const int64_t col = static_cast<int64_t>(index) * kSwizzleCols;
  SwizzleTile tile{.run = swizzle_run(p.panels, at.panel, p.form),
                   .row = rowwise ? at.row : col,
                   .col = rowwise ? col : at.row,
                   .rows = 0,
                   .cols = 0};
  tile.rows = static_cast<int>(min<int64_t>(tile.run.rows - tile.row, kTileRows));
  tile.cols = static_cast<int>(min<int64_t>(tile.run.cols - tile.col, kSwizzleCols));
  if constexpr (kDirection == Direction::kSwizzle)
    swizzle_tile(p, s, tile);
  else
    unswizzle_tile(p, s, tile);
}

struct Swizzle {
  std::string_view op;
  View<const e8m0> from;
  View<e8m0> to;
  Form form;
};

template <Direction kDirection>
void launch_swizzle(const Swizzle& swizzle, const Panels& panels, void* stream) {
  const SwizzleParams params{
      .panels = panels,
      .form = swizzle.form,
      .from = swizzle.from.data,
      .to = swizzle.to.data,
      .from_bytes = numel(swizzle.from.shape),
      .to_bytes = numel(swizzle.to.shape),
      .row_tiles = num_row_tiles(panels, kScaleTileCols, panels.rows),
      .runs = static_cast<uint32_t>(ceil_div<int64_t>(panels.cols, kSwizzleCols))};
  launch({swizzle.op, stream, params.row_tiles * params.runs}, swizzle_kernel<kDirection>, params);
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
