#include "moxie/core/groups/backends.h"
#include "moxie/core/layout/panel.cuh"

namespace moxie::cuda {
namespace {

// A CTA copies 128 rows of this many bytes: the 16 bytes of each lane of a warp, once.
constexpr int kSliceBytes = 16 * kWarp;

struct OffsParams {
  Panels panels;
  int64_t alignment;
  int32_t* starts;  // may be nullptr
  int32_t* ends;
};

__global__ __launch_bounds__(kThreads) void padded_offs_kernel(
    const __grid_constant__ OffsParams p) {
  __shared__ RowTileSearch search;
  int64_t tiles;
  for_my_groups(p.panels, p.alignment, search, tiles, [&](const Panel& panel, int64_t) {
    if (p.starts) p.starts[panel.index] = static_cast<int32_t>(panel.padded);
    p.ends[panel.index] = static_cast<int32_t>(panel.padded + round_up(panel.rows, p.alignment));
  });
}

template <class Word>
struct CopyParams {
  Panels panels;  // of the rows without padding; cols counts words
  int64_t alignment;
  const Word* from;
  Word* to;
  int64_t from_rows, to_rows;
  const int32_t* starts;  // unpad; nullptr: pad
  int64_t slices, tiles;
};

// Pads and unpads. Rows of `to` without a source, inside a group or after the last, become 0.
template <class Word>
__global__ __launch_bounds__(kThreads) void copy_kernel(
    const __grid_constant__ CopyParams<Word> p) {
  __shared__ RowTileSearch search;
  const int64_t tile = work_index();
  if (tile >= p.tiles) return;
  const RowTile& at = find_row_tile(p.panels, p.alignment, tile / p.slices, search);
  const int64_t to_begin = p.starts ? at.panel.begin : at.panel.padded;
  const int64_t to_end = at.tail ? p.to_rows : to_begin + round_up(at.panel.rows, p.alignment);
  int64_t from_begin = at.panel.begin, from_count = at.tail ? 0 : at.panel.rows;
  if (p.starts && !at.tail) from_begin = p.starts[at.panel.index];

  constexpr int kSlice = kSliceBytes / static_cast<int>(sizeof(Word));
  const int64_t first = tile % p.slices * kSlice;
  const int64_t last = min<int64_t>(first + kSlice, p.panels.cols);
#pragma unroll 4
  for (int row = warp_index(); row < kTileRows; row += kWarps) {
    const int64_t r = at.row + row, to = to_begin + r, from = from_begin + r;
    if (to >= to_end) break;
    // starts come from the caller and are not to be trusted.
    const bool copied = r < from_count && from >= 0 && from < p.from_rows;
    for (int64_t i = first + lane_index(); i < last; i += kWarp)
      p.to[to * p.panels.cols + i] = copied ? p.from[from * p.panels.cols + i] : Word{};
  }
}

// The widest word that rows are whole numbers of.
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
  View<const int32_t> offs;
  int64_t rows;  // that offs counts
  int64_t alignment = 1;
  const int32_t* starts = nullptr;
};

void launch_copy(const Copy& copy, void* stream) {
  const int64_t row_bytes = copy.to.dim(1);
  with_word(copy.from.data, copy.to.data, row_bytes, [&]<class Word>() {
    CopyParams<Word> params{.panels = {.rows = copy.rows,
                                       .cols = row_bytes / static_cast<int64_t>(sizeof(Word)),
                                       .count = copy.offs.dim(0),
                                       .offs = copy.offs.data,
                                       .weights = false},
                            .alignment = copy.alignment,
                            .from = reinterpret_cast<const Word*>(copy.from.data),
                            .to = reinterpret_cast<Word*>(copy.to.data),
                            .from_rows = copy.from.dim(0),
                            .to_rows = copy.to.dim(0),
                            .starts = copy.starts,
                            .slices = ceil_div<int64_t>(row_bytes, kSliceBytes),
                            .tiles = 0};
    params.tiles = num_row_tiles(params.panels, copy.alignment, copy.to.dim(0)) * params.slices;
    launch({copy.op, stream, params.tiles}, copy_kernel<Word>, params);
  });
}

Panels panels_of(const View<const int32_t>& offs, int64_t rows) {
  return {.rows = rows, .cols = 0, .count = offs.dim(0), .offs = offs.data, .weights = false};
}

}  // namespace

void padded_offs(const PaddedOffsArgs& args, void* stream) {
  // The contract's bound on offs, so that no end leaves int32.
  const int64_t limit = std::numeric_limits<int32_t>::max() - kMaxGroups * args.alignment;
  const OffsParams params{.panels = panels_of(args.offs, limit),
                          .alignment = args.alignment,
                          .starts = nullptr,
                          .ends = args.padded.data};
  launch({"padded_offs", stream, 1}, padded_offs_kernel, params);
}

void pad_groups(const PadGroupsArgs& args, void* stream) {
  const OffsParams params{.panels = panels_of(args.offs, args.x.dim(0)),
                          .alignment = args.alignment,
                          .starts = args.starts.data,
                          .ends = args.ends.data};
  launch({"pad_groups", stream, 1}, padded_offs_kernel, params);
  launch_copy({.op = "pad_groups",
               .from = args.x,
               .to = args.padded,
               .offs = args.offs,
               .rows = args.x.dim(0),
               .alignment = args.alignment},
              stream);
}

void unpad_groups(const UnpadGroupsArgs& args, void* stream) {
  launch_copy({.op = "unpad_groups",
               .from = args.padded,
               .to = args.x,
               .offs = args.offs,
               .rows = args.x.dim(0),
               .starts = args.starts.data},
              stream);
}

}  // namespace moxie::cuda
