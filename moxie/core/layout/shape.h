// The shape of every result, as a function of the input's shape. Templates over the integer type,
// because the checks of an op, its Meta kernel and torch.compile (symbolic sizes) all call these.
#pragma once

#include <cstdint>
#include <optional>
#include <type_traits>

#include "moxie/core/base/math.h"
#include "moxie/core/base/view.h"
#include "moxie/core/format/block.h"
#include "moxie/core/layout/swizzle.h"

namespace moxie {

// x is either tokens [R, C], whose rows may fall into G ragged groups (offs), or weights
// [G, N, K]: G matrices of one size.

// Bytes that an H200 writes to memory at once: writing half of such a line takes more than half the
// time of the whole (docs/kernels/quantize.md).
inline constexpr int64_t kMemoryLine = 256;

// Rounds down to a multiple of a power of two. Integers use a mask, because kernels call this on
// their critical path; torch's symbolic integers support only division.
template <class Int>
constexpr Int floor_to(const Int& value, int64_t power_of_two) {
  if constexpr (std::is_integral_v<Int>)
    return value & -static_cast<Int>(power_of_two);
  else
    return value / Int(power_of_two) * Int(power_of_two);
}

// The fewest rows of a buffer that can hold any G groups of R rows in total, each group padded to a
// multiple of `alignment` (a power of two).
template <class Int>
constexpr Int least_padded_rows(const Int& rows, const Int& num_groups, int64_t alignment) {
  return floor_to<Int>(rows + num_groups * (alignment - 1), alignment);
}

// Rows of a padded buffer for ragged groups; the host can allocate it without reading offs. For MX
// blocks it is a multiple of a memory line, so that all columns of a colwise form are equally
// aligned.
template <class Int>
constexpr Int padded_rows(const Int& rows, const Int& num_groups, int64_t alignment) {
  const Int least = least_padded_rows(rows, num_groups, alignment);
  return alignment < kMxBlock ? least : floor_to<Int>(least + (kMemoryLine - 1), kMemoryLine);
}

// Size of k in the colwise form of tokens. Without offs, the rows of x are padded to the block
// only.
template <class Int>
constexpr Int colwise_k(const Int& rows, const std::optional<Int>& num_groups, int block_rows) {
  return num_groups ? padded_rows(rows, *num_groups, block_rows)
                    : least_padded_rows(rows, Int(1), block_rows);
}

template <class Int>
struct OperandShape {
  BasicShape<Int> qdata;
  BasicShape<Int> scale;
};

// Shape of the scales of an operand [outer, k] that has no ragged groups.
template <class Int>
BasicShape<Int> scale_matrix(const Int& outer, const Int& k, int outer_block, int k_block,
                             ScaleLayout layout) {
  if (layout == ScaleLayout::kSwizzled)
    return {round_up(outer, Int(kScaleTileRows)),
            round_up(ceil_div(k, Int(kMxBlock)), Int(kScaleTileCols))};
  const Int outers = ceil_div(outer, Int(outer_block)), ks = ceil_div(k, Int(k_block));
  if (layout == ScaleLayout::kPlain) return {outers, ks};
  return {ceil_div(ks, Int(kQuad)) * outers, Int(kQuad)};
}

// Shapes of one form of x. num_groups is the length of offs; absent if x is weights, or tokens in
// one group.
template <class Int>
OperandShape<Int> operand_shape(const BasicShape<Int>& x, const std::optional<Int>& num_groups,
                                Form form, Block block, ScaleLayout layout) {
  const bool rowwise = form == Form::kRowwise;
  const int outer_block = outer_of(block, form), k_block = k_of(block, form);
  if (x.dims == 3) {
    const Int outer = rowwise ? x[1] : x[2], k = rowwise ? x[2] : x[1];
    const auto scale = scale_matrix(outer, k, outer_block, k_block, layout);
    if (layout == ScaleLayout::kSwizzled) return {{x[0], outer, k}, {x[0], scale[0] * scale[1]}};
    return {{x[0], outer, k}, {x[0], scale[0], scale[1]}};
  }
  const Int groups = num_groups.value_or(Int(1));
  const Int outer = rowwise ? x[0] : x[1];
  const Int k = rowwise ? x[1] : colwise_k(x[0], num_groups, block.rows);
  auto scale = scale_matrix(outer, k, outer_block, k_block, layout);
  if (layout == ScaleLayout::kSwizzled && num_groups) {
    // Each group's scales start a new tile, so each group may need one tile more.
    if (rowwise)
      scale.size[0] = outer + groups * Int(kScaleTileRows);
    else
      scale.size[1] = k / Int(kMxBlock) + groups * Int(kScaleTileCols);
  }
  return {{outer, k}, scale};
}

// The fp8_rowwise recipe has one f32 scale per row, or per column of a group. It pads groups of its
// colwise form to 16 rows, because FP8 GEMMs need leading dimensions that are multiples of 16.
inline constexpr int kRowScaleAlignment = 16;

template <class Int>
OperandShape<Int> row_scale_shape(const BasicShape<Int>& x, const std::optional<Int>& num_groups,
                                  Form form) {
  const bool rowwise = form == Form::kRowwise;
  if (x.dims == 3)
    return rowwise ? OperandShape<Int>{x, {x[0], x[1]}}
                   : OperandShape<Int>{{x[0], x[2], x[1]}, {x[0], x[2]}};
  const Int groups = num_groups.value_or(Int(1));
  if (rowwise) return {x, {x[0]}};
  return {{x[1], padded_rows(x[0], groups, kRowScaleAlignment)}, {groups, x[1]}};
}

// Rows of the result of pad_groups. The size is torchao's: one alignment unit per group more than
// R.
template <class Int>
Int pad_groups_rows(const Int& rows, const Int& num_groups, int64_t alignment) {
  return round_up(rows + num_groups * alignment, Int(alignment));
}

}  // namespace moxie
