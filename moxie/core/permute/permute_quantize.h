// permute_quantize: gathers rows while it quantizes them, so that the permuted rows are never in
// memory. Bit-equal to permute followed by quantize.
#pragma once

#include "moxie/core/quantize/quantize.h"

namespace moxie {

struct PermuteQuantizeArgs {
  ConstFloatView x;             // [T, D]
  View<const int32_t> slot_of;  // [R], R = T * k
  int64_t top_k = 1;            // k
  // [R], the inverse of slot_of; optional. With it, the rowwise form alone needs x only once. On a
  // GPU, what is not the inverse leaves rows as they were.
  std::optional<View<const int32_t>> row_of = std::nullopt;
  QuantizeForms forms;  // of rows [R, D]
};
void permute_quantize(const PermuteQuantizeArgs& args, const Exec& exec);

}  // namespace moxie
