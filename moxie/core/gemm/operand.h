// A quantized operand as a GEMM reads it: the contraction dimension k is last and contiguous. Both
// the rowwise and the colwise form are stored like this (format/block.h: outer_of, k_of).
#pragma once

#include "moxie/core/format/bf16.h"
#include "moxie/core/layout/check_args.h"

namespace moxie {

struct GemmOperand {
  View<const e4m3> qdata;  // [outer, k] or [G, outer, k]
  View<const e8m0> scale;  // [.., ceil(outer / outer_block), ceil(k / k_block)]; or in quads
  int outer_block = 1;     // 1, 32 or 128
  int k_block = 128;       // 32 or 128
  ScaleLayout layout = ScaleLayout::kPlain;
};

// bias must be absent, [n] or [groups, n].
void check_bias(std::string_view op, const std::optional<ConstFloatView>& bias, int64_t groups,
                int64_t n);
void check_gemm_operand(std::string_view op, std::string_view argument, const GemmOperand& operand);

}  // namespace moxie
