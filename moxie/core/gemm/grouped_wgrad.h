// grouped_wgrad: the contraction runs over the rows of each group,
//   out[g, n, k] = sum over r in group g of a[n, r] * b[k, r].
// a = dy colwise, b = x colwise; r counts padded rows, each group's padding being zeros that its
// own last block covers.
#pragma once

#include <string>

#include "moxie/core/gemm/operand.h"

namespace moxie {

enum class Sum : uint8_t {
  kOverwrite,
  kAdd,  // out += the sum: gradient accumulation into an f32 main gradient
};

struct GroupedWgradArgs {
  GemmOperand a;                     // [N, padded R]
  GemmOperand b;                     // [K, padded R], of the same k_block
  int64_t rows = 0;                  // R
  OptionalOffs offs = std::nullopt;  // [G], in rows before padding; absent: one group
  FloatView out = {};                // [G, N, K]; an empty group's is 0 (or stays, under kAdd)
  Sum sum = Sum::kOverwrite;
};

// Which kernel runs: see grouped_mm.h.
void grouped_wgrad(const GroupedWgradArgs& args, const Exec& exec);

std::string why_not_sm90(const GroupedWgradArgs& args);

}  // namespace moxie
