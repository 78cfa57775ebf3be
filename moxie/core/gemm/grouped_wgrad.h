// grouped_wgrad: contracts the rows of each group,
//   out[g, n, k] = sum over r in group g of a[n, r] * b[k, r].
// a = dy colwise, b = x colwise. r counts padded rows: each group is padded to whole blocks.
#pragma once

#include <cstddef>
#include <string>

#include "moxie/core/gemm/operand.h"

namespace moxie {

enum class Sum : uint8_t {
  kOverwrite,
  kAdd,  // out += the sum: gradient accumulation into an f32 main gradient
};

// What a and b hold in the padding of a group. The padding never contributes to the result.
enum class Padding : uint8_t {
  kZeros,     // zeros, as the quantizers write
  kAnything,  // any bytes; the Hopper kernel reads zeros instead
};

// The workspace of the Hopper kernel if the padding may be anything: two tensor maps of 128 bytes
// for each of the 4 tiles that each of up to 144 CTAs has in its ring (end_maps.cuh).
inline constexpr int64_t kWgradWorkspace = 144 * 4 * 2 * 128, kWgradWorkspaceAlignment = 128;

struct GroupedWgradArgs {
  GemmOperand a;                     // [N, padded R]
  GemmOperand b;                     // [K, padded R], same k_block as a
  int64_t rows = 0;                  // R
  OptionalOffs offs = std::nullopt;  // [G], in unpadded rows; absent: one group
  FloatView out = {};                // [G, N, K]; 0 for an empty group (unchanged under kAdd)
  Sum sum = Sum::kOverwrite;
  Padding padding = Padding::kZeros;
  View<std::byte> workspace = {};  // cuda, kAnything and offs: [kWgradWorkspace]; else unused
};

// Which kernel runs: see grouped_mm.h.
void grouped_wgrad(const GroupedWgradArgs& args, const Exec& exec);

std::string why_not_sm90(const GroupedWgradArgs& args);

}  // namespace moxie
