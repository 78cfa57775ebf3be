#include <algorithm>

#include "moxie/core/scale_layout/backends.h"

namespace moxie::ref {
namespace {

// Calls f(index in plain, index in swizzled) for every scale that a group covers.
template <class F>
void for_each_scale(const Panels& panels, Form form, F&& f) {
  Panel panel = first_panel();
  for (int64_t g = 0; g < panels.count; ++g) {
    panel = next_panel(panels, panel, kScaleTileCols);
    const SwizzleRun run = swizzle_run(panels, panel, form);
    for (int64_t r = 0; r < run.rows; ++r)
      for (int64_t c = 0; c < run.cols; ++c)
        f(run.plain + r * run.plain_stride + c,
          run.swizzled + swizzled_index(r, c, run.tiles_per_row));
  }
}

// Calls f(index in replicated, index in compact) for every replicated scale.
template <class F>
void for_each_replica(const Shape& replicated, Form form, Block block, F&& f) {
  const Shape compact = compact_shape<int64_t>(replicated, form, block);
  const int64_t outer = replicated.dim(-2), cols = replicated.dim(-1);
  const int64_t outer_block = outer_of(block, form), k_block = k_of(block, form) / kMxBlock;
  for (int64_t i = 0; i < numel(replicated); ++i) {
    const int64_t stack = i / (outer * cols), row = i / cols % outer, col = i % cols;
    f(i, (stack * compact.dim(-2) + row / outer_block) * compact.dim(-1) + col / k_block);
  }
}

}  // namespace

void swizzle_scale(const SwizzleArgs& args, const Panels& panels) {
  std::fill_n(args.swizzled.data, numel(args.swizzled.shape), e8m0{});
  for_each_scale(panels, args.form, [&](int64_t plain, int64_t swizzled) {
    args.swizzled.data[swizzled] = args.plain.data[plain];
  });
}

void unswizzle_scale(const UnswizzleArgs& args, const Panels& panels) {
  std::fill_n(args.plain.data, numel(args.plain.shape), e8m0{});
  for_each_scale(panels, args.form, [&](int64_t plain, int64_t swizzled) {
    args.plain.data[plain] = args.swizzled.data[swizzled];
  });
}

void replicate_scale(const ReplicateArgs& args) {
  for_each_replica(args.replicated.shape, args.form, args.block,
                   [&](int64_t replicated, int64_t compact) {
                     args.replicated.data[replicated] = args.compact.data[compact];
                   });
}

void compact_scale(const CompactArgs& args) {
  for_each_replica(args.replicated.shape, args.form, args.block,
                   [&](int64_t replicated, int64_t compact) {
                     args.compact.data[compact] = args.replicated.data[replicated];
                   });
}

}  // namespace moxie::ref
