// Converts scales between layouts, for interop: Moxie's quantizers write the layout that their
// consumer reads, so training never calls these ops. Scales belong to an operand [outer, k]
// (format/block.h). The plain scales here have one scale per 1 x 32: [outer, ceil(k / 32)], or a
// stack of such matrices for weights.
#pragma once

#include "moxie/core/layout/check_args.h"

namespace moxie {

// swizzle_scale: from plain to swizzled. Without offs the scales are one matrix, or the G matrices
// of a stack. With offs the operand is ragged. A rowwise operand is ragged along its rows, and offs
// count rows; a colwise operand is ragged along k, and offs count columns of scales
// (padded_offs(offs, 32) / 32 of the token offs).
struct SwizzleArgs {
  Form form = Form::kRowwise;  // what offs count: rows, or columns of scales
  View<const e8m0> plain;      // [outer, cols] or [G, outer, cols]
  OptionalOffs offs = std::nullopt;
  View<e8m0> swizzled;  // result, swizzled_shape(); padding is 0
};
void swizzle_scale(const SwizzleArgs& args, const Exec& exec);

struct UnswizzleArgs {
  Form form = Form::kRowwise;
  View<const e8m0> swizzled;
  OptionalOffs offs = std::nullopt;
  View<e8m0> plain;  // result; 0 where no group covers it
};
void unswizzle_scale(const UnswizzleArgs& args, const Exec& exec);

template <class Int>
BasicShape<Int> swizzled_shape(const BasicShape<Int>& plain, const std::optional<Int>& num_groups,
                               Form form) {
  const Int outer = plain.dim(-2), cols = plain.dim(-1);
  Int rows = round_up(outer, Int(kScaleTileRows)), width = round_up(cols, Int(kScaleTileCols));
  if (plain.dims == 3) return {plain[0], rows * width};
  if (num_groups && form == Form::kRowwise) rows = outer + *num_groups * Int(kScaleTileRows);
  if (num_groups && form == Form::kColwise) width = cols + *num_groups * Int(kScaleTileCols);
  return {rows, width};
}

// replicate_scale: from one scale per block to one per 1 x 32, by repeating it.
struct ReplicateArgs {
  Form form = Form::kRowwise;
  Block block = {};          // rows x cols of x
  View<const e8m0> compact;  // [ceil(outer / block), ceil(k / block)] or a stack
  View<e8m0> replicated;     // result, [outer, ceil(k / 32)] or a stack
};
void replicate_scale(const ReplicateArgs& args, const Exec& exec);

// compact_scale: from one scale per 1 x 32 to one per block. Scales that differ inside a block are
// refused on a CPU; a GPU takes the first of each block.
struct CompactArgs {
  Form form = Form::kRowwise;
  Block block;
  View<const e8m0> replicated;
  View<e8m0> compact;  // result
};
void compact_scale(const CompactArgs& args, const Exec& exec);

template <class Int>
BasicShape<Int> compact_shape(const BasicShape<Int>& replicated, Form form, Block block) {
  auto shape = replicated;
  const int outer = replicated.dims - 2, k = replicated.dims - 1;
  shape.size[outer] = ceil_div(replicated[outer], Int(outer_of(block, form)));
  shape.size[k] = ceil_div(replicated[k], Int(max(k_of(block, form) / kMxBlock, 1)));
  return shape;
}

}  // namespace moxie
