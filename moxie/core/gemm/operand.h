// A quantized operand as a GEMM sees it: the contraction k is last and contiguous. Both forms of
// quantize end like this (format/block.h: outer_of, k_of).
#pragma once

#include "moxie/core/format/bf16.h"
#include "moxie/core/layout/check_args.h"

namespace moxie {

struct GemmOperand {
  View<const e4m3> qdata;  // [outer, k] or [G, outer, k]
  View<const e8m0> scale;  // [.., outer / outer_block, k / k_block], ceilings; or quads of them
  int outer_block = 1;     // 1, 32 or 128
  int k_block = 128;       // 32 or 128
  ScaleLayout layout = ScaleLayout::kPlain;
};

// bias, where there is one, is [n] or [groups, n].
void check_bias(std::string_view op, const std::optional<ConstFloatView>& bias, int64_t groups,
                int64_t n);
void check_gemm_operand(std::string_view op, std::string_view argument, const GemmOperand& operand);

}  // namespace moxie
