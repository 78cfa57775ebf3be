// grouped_wgrad: the contraction runs over the rows of each group,
//   out[g, n, k] = sum over r in group g of a[n, r] * b[k, r].
// a = dy colwise, b = x colwise; r counts padded rows, each group's padding being in its own last
// block.
#pragma once

#include <string>

#include "moxie/core/gemm/operand.h"

namespace moxie {

enum class Sum : uint8_t {
  kOverwrite,
  kAdd,  // out += the sum: gradient accumulation into an f32 main gradient
};

// What the elements of a and b hold in the padding of a group. It adds nothing in either case.
enum class Padding : uint8_t {
  kZeros,     // as quantizers leave it
  kAnything,  // whatever a caller has put there: Hopper's kernel makes it zero on the way
};

struct GroupedWgradArgs {
  GemmOperand a;                     // [N, padded R]
  GemmOperand b;                     // [K, padded R], of the same k_block
  int64_t rows = 0;                  // R
  OptionalOffs offs = std::nullopt;  // [G], in rows before padding; absent: one group
  FloatView out = {};                // [G, N, K]; an empty group's is 0 (or stays, under kAdd)
  Sum sum = Sum::kOverwrite;
  Padding padding = Padding::kZeros;
};

// Which kernel runs: see grouped_mm.h.
void grouped_wgrad(const GroupedWgradArgs& args, const Exec& exec);

std::string why_not_sm90(const GroupedWgradArgs& args);

}  // namespace moxie
