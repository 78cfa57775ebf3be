// decode: dequantizes part of an operand to bf16 or f32, in the operand's own order, for a
// high-precision GEMM. The CPU path decodes and multiplies panel by panel, so that decoded values
// are still in cache when they are multiplied.
#pragma once

#include "moxie/core/gemm/operand.h"

namespace moxie {

struct DecodeArgs {
  GemmOperand operand;  // [outer, k] or [G, outer, k]
  int64_t matrix = 0;   // index in G
  int64_t first_outer = 0;
  int64_t first_k = 0;  // a multiple of k_block
  FloatView out = {};   // [outers, ks]
};

// Backends: ref and cpu.
void decode(const DecodeArgs& args, const Exec& exec);

}  // namespace moxie
