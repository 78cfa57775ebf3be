// grouped_mm: multiplies the rows of group g with the transposed matrix of group g,
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
  OptionalOffs offs = std::nullopt;                   // [G]; absent: one group with all rows
  std::optional<ConstFloatView> bias = std::nullopt;  // [N] or [G, N]
  FloatView out = {};                                 // [R, N]; rows that no group covers are 0
};

// On a GPU this is the Hopper kernel, for arguments that why_not_sm90() accepts. On a CPU it is the
// reference, for tests: the torch layer multiplies with torch's own GEMM there.
void grouped_mm(const GroupedMmArgs& args, const Exec& exec);

// The first rule of the Hopper kernel that the arguments break, in words; empty if they break none.
std::string why_not_sm90(const GroupedMmArgs& args);

}  // namespace moxie
