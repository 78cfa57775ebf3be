// grouped_mm: rows of group g times the matrix of group g, transposed,
//   out[r, n] = sum over k of a[r, k] * b[g, n, k]  (+ bias[g, n])           for r in group g.
// forward is a = x rowwise, b = w rowwise; dgrad is a = dy rowwise, b = w colwise ([G, K, N]).
#pragma once

#include <optional>
#include <string>

#include "moxie/core/gemm/operand.h"

namespace moxie {

struct GroupedMmArgs {
  GemmOperand a;                                      // [R, K], outer_block 1 where offs is given
  GemmOperand b;                                      // [G, N, K]
  OptionalOffs offs = std::nullopt;                   // [G]; absent: G is 1 and has every row
  std::optional<ConstFloatView> bias = std::nullopt;  // [N] or [G, N]
  FloatView out = {};                                 // [R, N]; rows that no group covers are 0
};

// On a GPU this is the Hopper kernel, which takes what why_not_sm90() has nothing to say about; on
// a CPU it is ref, for comparison (the torch layer multiplies with the machine's own product).
void grouped_mm(const GroupedMmArgs& args, const Exec& exec);

// The first rule of the Hopper kernel that the problem breaks, in words; empty if none.
std::string why_not_sm90(const GroupedMmArgs& args);

}  // namespace moxie
