// decode: part of a stored operand in bf16 or f32, in the order it is stored, for the matrix
// product of the machine at hand. A CPU takes an operand panel by panel, so that what is decoded is
// multiplied while it is in a cache.
#pragma once

#include "moxie/core/gemm/operand.h"

namespace moxie {

struct DecodeArgs {
  GemmOperand operand;  // [outer, k] or [G, outer, k]
  int64_t matrix = 0;   // g
  int64_t first_outer = 0;
  int64_t first_k = 0;  // a multiple of k_block
  FloatView out = {};   // [outers, ks]
};

// Backends: ref and cpu.
void decode(const DecodeArgs& args, const Exec& exec);

}  // namespace moxie
