#include <algorithm>
#include <cstring>
#include <vector>

#include "moxie/core/base/parallel.h"
#include "moxie/core/scale_layout/backends.h"
#include "moxie/core/simd/clear.h"
#include "moxie/core/simd/pick_isa.h"

namespace moxie::cpu {
namespace {

constexpr int64_t kGrainRows = 64;  // a few kilobytes of scales

// Calls f(run, row) for every row of every run; rows are distributed over threads.
template <class F>
void for_each_row(const Panels& panels, Form form, const Exec& exec, const F& f) {
  std::vector<SwizzleRun> runs;
  std::vector<int64_t> ends;  // rows up to the end of each run
  Panel panel = first_panel();
  for (int64_t g = 0; g < panels.count; ++g) {
    panel = next_panel(panels, panel, kScaleTileCols);
    runs.push_back(swizzle_run(panels, panel, form));
    ends.push_back((ends.empty() ? 0 : ends.back()) + runs.back().rows);
  }
  parallel_for(exec, ends.empty() ? 0 : ends.back(), kGrainRows, [&](int64_t begin, int64_t end) {
    auto at = std::upper_bound(ends.begin(), ends.end(), begin) - ends.begin();
    for (int64_t i = begin; i < end; ++i) {
      while (ends[at] <= i) ++at;
      f(runs[at], i - (ends[at] - runs[at].rows));
    }
  });
}

// Columns of the run in the tile at `col`: up to four, which are adjacent in the tile.
int64_t tile_cols(const SwizzleRun& run, int64_t col) {
  return min(kScaleTileCols, run.cols - col);
}

}  // namespace

void swizzle_scale(const SwizzleArgs& args, const Panels& panels, const Exec& exec) {
  check_isa("swizzle_scale", exec);
  clear_bytes(exec, args.swizzled.data, numel(args.swizzled.shape));
  for_each_row(panels, args.form, exec, [&](const SwizzleRun& run, int64_t row) {
    const e8m0* from = args.plain.data + run.plain + row * run.plain_stride;
    for (int64_t col = 0; col < run.cols; col += kScaleTileCols)
      std::copy_n(from + col, tile_cols(run, col),
                  args.swizzled.data + run.swizzled + swizzled_index(row, col, run.tiles_per_row));
  });
}

void unswizzle_scale(const UnswizzleArgs& args, const Panels& panels, const Exec& exec) {
  check_isa("unswizzle_scale", exec);
  if (panels.offs) clear_bytes(exec, args.plain.data, numel(args.plain.shape));
  for_each_row(panels, args.form, exec, [&](const SwizzleRun& run, int64_t row) {
    e8m0* to = args.plain.data + run.plain + row * run.plain_stride;
    for (int64_t col = 0; col < run.cols; col += kScaleTileCols)
      std::copy_n(args.swizzled.data + run.swizzled + swizzled_index(row, col, run.tiles_per_row),
                  tile_cols(run, col), to + col);
  });
}

namespace {

// Shapes of the replicated and the compact scales, and how their rows correspond.
struct Replicas {
  int64_t outer, cols, compact_outer, compact_cols, outer_block, k_block, stacks;

  Replicas(const Shape& replicated, Form form, Block block) {
    const Shape compact = compact_shape<int64_t>(replicated, form, block);
    outer = replicated.dim(-2), cols = replicated.dim(-1);
    compact_outer = compact.dim(-2), compact_cols = compact.dim(-1);
    outer_block = outer_of(block, form), k_block = k_of(block, form) / kMxBlock;
    stacks = replicated.dims == 3 ? replicated[0] : 1;
  }
};

}  // namespace

void replicate_scale(const ReplicateArgs& args, const Exec& exec) {
  check_isa("replicate_scale", exec);
  const Replicas r(args.replicated.shape, args.form, args.block);
  parallel_for(exec, r.stacks * r.outer, kGrainRows, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = i / r.outer * r.compact_outer + i % r.outer / r.outer_block;
      const e8m0* from = args.compact.data + row * r.compact_cols;
      e8m0* to = args.replicated.data + i * r.cols;
      for (int64_t c = 0; c < r.cols; ++c) to[c] = from[c / r.k_block];
    }
  });
}

void compact_scale(const CompactArgs& args, const Exec& exec) {
  check_isa("compact_scale", exec);
  const Replicas r(args.replicated.shape, args.form, args.block);
  parallel_for(exec, r.stacks * r.compact_outer, kGrainRows, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = i / r.compact_outer * r.outer + i % r.compact_outer * r.outer_block;
      const e8m0* from = args.replicated.data + row * r.cols;
      e8m0* to = args.compact.data + i * r.compact_cols;
      for (int64_t c = 0; c < r.compact_cols; ++c) to[c] = from[c * r.k_block];
    }
  });
}

}  // namespace moxie::cpu
