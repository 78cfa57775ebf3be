// The backends of the scale layout ops; arguments arrive checked. Private to this folder.
#pragma once

#include "moxie/core/scale_layout/scale_layout.h"

namespace moxie {

// A run is a matrix of scales that is swizzled on its own: one of a stack, or the scales of a
// group.
struct SwizzleRun {
  int64_t plain, plain_stride;  // index of element (0, 0); elements from one row to the next
  int64_t rows, cols;
  int64_t swizzled, tiles_per_row;
};

constexpr Panels swizzle_panels(const Shape& plain, const int32_t* offs, int64_t num_groups,
                                Form form) {
  // Panels divide the dimension that offs count: rows, or columns of scales.
  const bool rowwise = form == Form::kRowwise;
  return {.rows = rowwise ? plain.dim(-2) : plain.dim(-1),
          .cols = rowwise ? plain.dim(-1) : plain.dim(-2),
          .count = plain.dims == 3 ? plain[0] : num_groups,
          .offs = offs,
          .weights = plain.dims == 3};
}

// The run of a panel that next_panel(panels, ..., kScaleTileCols) returned.
constexpr SwizzleRun swizzle_run(const Panels& p, const Panel& panel, Form form) {
  if (form == Form::kRowwise) {
    const int64_t tiles = ceil_div(p.cols, kScaleTileCols);
    const int64_t row = p.weights ? panel.index * round_up(p.rows, kScaleTileRows) : panel.tiled;
    return {panel.begin * p.cols, p.cols, panel.rows, p.cols, row * tiles * kScaleTileCols, tiles};
  }
  const int64_t height = round_up(p.cols, kScaleTileRows);
  const int64_t tiles = ceil_div(panel.rows, kScaleTileCols);
  if (p.weights)
    return {panel.begin * p.cols,
            p.rows,
            p.cols,
            p.rows,
            panel.index * height * tiles * kScaleTileCols,
            tiles};
  return {panel.begin, p.rows, p.cols, panel.rows, height * panel.padded, tiles};
}

namespace ref {
void swizzle_scale(const SwizzleArgs& args, const Panels& panels);
void unswizzle_scale(const UnswizzleArgs& args, const Panels& panels);
void replicate_scale(const ReplicateArgs& args);
void compact_scale(const CompactArgs& args);
}  // namespace ref
namespace cpu {
void swizzle_scale(const SwizzleArgs& args, const Panels& panels, const Exec& exec);
void unswizzle_scale(const UnswizzleArgs& args, const Panels& panels, const Exec& exec);
void replicate_scale(const ReplicateArgs& args, const Exec& exec);
void compact_scale(const CompactArgs& args, const Exec& exec);
}  // namespace cpu
namespace cuda {
void swizzle_scale(const SwizzleArgs& args, const Panels& panels, void* stream);
void unswizzle_scale(const UnswizzleArgs& args, const Panels& panels, void* stream);
void replicate_scale(const ReplicateArgs& args, void* stream);
void compact_scale(const CompactArgs& args, void* stream);
}  // namespace cuda

}  // namespace moxie
