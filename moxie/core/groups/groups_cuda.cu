#include "moxie/core/base/cuda.cuh"
#include "moxie/core/groups/backends.h"
#include "moxie/core/tile/group_search.cuh"

namespace moxie::cuda {
namespace {

// A CTA copies 128 rows of one or more slices. A slice is 16 bytes for each lane of a warp.
constexpr int kSliceBytes = 16 * kWarp;
constexpr int kInFlight = 8;  // rows that a warp loads before it stores the first

struct OffsParams {
  Panels panels;
  int64_t alignment;
  int32_t* starts;  // may be nullptr
  int32_t* ends;
};

__device__ void store_offs(const OffsParams& p, RowTileSearch& search) {
  for_each_group(p.panels, p.alignment, search, [&](const Panel& panel) {
    if (p.starts) p.starts[panel.index] = static_cast<int32_t>(panel.padded);
    p.ends[panel.index] = static_cast<int32_t>(panel.padded + align_up(panel.rows, p.alignment));
  });
}

__global__ __launch_bounds__(kThreads) void padded_offs_kernel(
    const __grid_constant__ OffsParams p) {
  __shared__ RowTileSearch search;
  store_offs(p, search);
}

template <class Word>
struct CopyParams {
  OffsParams offs;  // panels of the unpadded rows; panels.cols is in words
  const Word* from;
  Word* to;
  int64_t from_rows, to_rows;
  const int32_t* starts;  // unpad; nullptr: pad
  int64_t run_words, row_tiles;
  uint32_t runs;  // runs of words in a row
};

// Pads and unpads. Rows of `to` without a source become 0: padding, and rows past the last group.
template <class Word>
__global__ __launch_bounds__(kThreads) void copy_kernel(
    const __grid_constant__ CopyParams<Word> p) {
  __shared__ RowTileSearch search;
  const auto work = static_cast<uint32_t>(work_index());
  if (work / p.runs >= p.row_tiles) return;
  if (work == 0 && p.offs.ends) {
    store_offs(p.offs, search);
    __syncthreads();
  }
  const Panels& panels = p.offs.panels;
  const RowTile& at = find_row_tile(panels, p.offs.alignment, work / p.runs, search);
  const int64_t to_begin = p.starts ? at.panel.begin : at.panel.padded;
  const int64_t to_end = at.tail ? p.to_rows : to_begin + align_up(at.panel.rows, p.offs.alignment);
  int64_t from_begin = at.panel.begin;
  if (p.starts && !at.tail) from_begin = p.starts[at.panel.index];
  // Rows of this tile that are stored; is_copied() says which of them have a source. starts come
  // from the caller and may be out of range.
  const int rows = static_cast<int>(min<int64_t>(to_end - to_begin - at.row, kTileRows));
  const auto is_copied = [&](int row) {
    const int64_t from = from_begin + at.row + row;
    return !at.tail && at.row + row < at.panel.rows && from >= 0 && from < p.from_rows;
  };
  const int64_t first = work % p.runs * p.run_words + lane_index();
  const int64_t last = min<int64_t>((work % p.runs + 1) * p.run_words, panels.cols);
  const Word* from = p.from + (from_begin + at.row) * panels.cols;
  Word* to = p.to + (to_begin + at.row) * panels.cols;
#pragma unroll 1
  for (int64_t i = first; i < last; i += kWarp) {
#pragma unroll 1
    for (int batch = warp_index(); batch < rows; batch += kWarps * kInFlight) {
      Word word[kInFlight];
#pragma unroll
      for (int k = 0; k < kInFlight; ++k) {
        const int row = batch + k * kWarps;
        word[k] = Word{};
        if (is_copied(row)) word[k] = from[row * panels.cols + i];
      }
#pragma unroll
      for (int k = 0; k < kInFlight; ++k)
        if (const int row = batch + k * kWarps; row < rows) to[row * panels.cols + i] = word[k];
    }
  }
}

// Calls f with the widest word that divides the rows and their addresses.
template <class F>
void with_word(const void* from, const void* to, int64_t row_bytes, F&& f) {
  const auto bits = reinterpret_cast<uintptr_t>(from) | reinterpret_cast<uintptr_t>(to) |
                    static_cast<uintptr_t>(row_bytes);
  if (bits % sizeof(uint4) == 0) return f.template operator()<uint4>();
  if (bits % sizeof(uint32_t) == 0) return f.template operator()<uint32_t>();
  return f.template operator()<uint8_t>();
}

struct Copy {
  std::string_view op;
  View<const std::byte> from;
  View<std::byte> to;
  OffsParams offs;
  const int32_t* starts = nullptr;
};

void launch_copy(const Copy& copy, void* stream) {
  const int64_t row_bytes = copy.to.dim(1);
  with_word(copy.from.data, copy.to.data, row_bytes, [&]<class Word>() {
    CopyParams<Word> params{.offs = copy.offs,
                            .from = reinterpret_cast<const Word*>(copy.from.data),
                            .to = reinterpret_cast<Word*>(copy.to.data),
                            .from_rows = copy.from.dim(0),
                            .to_rows = copy.to.dim(0),
                            .starts = copy.starts,
                            .run_words = 0,
                            .row_tiles = 0,
                            .runs = 0};
    const int64_t words = row_bytes / static_cast<int64_t>(sizeof(Word));
    params.offs.panels.cols = words;
    params.row_tiles = num_row_tiles(copy.offs.panels, copy.offs.alignment, copy.to.dim(0));
    // Long runs amortise the search for rows; short runs balance the SMs. kEnough CTAs are several
    // waves on 132 SMs.
    constexpr int64_t kMost = 4, kEnough = 4096;  // slices of a run; CTAs of a launch
    const int64_t slices = ceil_div<int64_t>(row_bytes, kSliceBytes);
    const int64_t length =
        max<int64_t>(min<int64_t>(params.row_tiles * slices / kEnough, kMost), 1);
    params.run_words = length * kSliceBytes / static_cast<int64_t>(sizeof(Word));
    // Rows of 0 bytes still need one CTA, to store starts and ends.
    params.runs = static_cast<uint32_t>(max<int64_t>(ceil_div(slices, length), 1));
    launch({copy.op, stream, params.row_tiles * params.runs}, copy_kernel<Word>, params);
  });
}

Panels panels_of(const View<const int32_t>& offs, int64_t rows) {
  return {.rows = rows, .cols = 0, .count = offs.dim(0), .offs = offs.data, .weights = false};
}

}  // namespace

void padded_offs(const PaddedOffsArgs& args, void* stream) {
  const int64_t rows = args.rows.value_or(most_rows(args.alignment));
  const OffsParams params{.panels = panels_of(args.offs, rows),
                          .alignment = args.alignment,
                          .starts = nullptr,
                          .ends = args.padded.data};
  launch({"padded_offs", stream, 1}, padded_offs_kernel, params);
}

void pad_groups(const PadGroupsArgs& args, void* stream) {
  launch_copy({.op = "pad_groups",
               .from = args.x,
               .to = args.padded,
               .offs = {.panels = panels_of(args.offs, args.x.dim(0)),
                        .alignment = args.alignment,
                        .starts = args.starts.data,
                        .ends = args.ends.data}},
              stream);
}

void unpad_groups(const UnpadGroupsArgs& args, void* stream) {
  launch_copy({.op = "unpad_groups",
               .from = args.padded,
               .to = args.x,
               .offs = {.panels = panels_of(args.offs, args.x.dim(0)),
                        .alignment = 1,
                        .starts = nullptr,
                        .ends = nullptr},
               .starts = args.starts.data},
              stream);
}

}  // namespace moxie::cuda
