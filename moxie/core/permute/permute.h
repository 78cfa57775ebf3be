// permute, unpermute: tokens to grouped rows and back, by the slots that route() made.
//   permute      rows[r]  = x[slot_of[r] / k]
//   unpermute    out[t]   = sum over j of weights[t, j] * rows[row_of[t * k + j]]
// and the gradients of both. Sums run over j in order, in f32, and are rounded once; there are no
// atomics, so results are reproducible.
#pragma once

#include <optional>

#include "moxie/core/format/bf16.h"
#include "moxie/core/layout/check_args.h"

namespace moxie {

struct PermuteArgs {
  ConstFloatView x;                                         // [T, D]
  View<const int32_t> slot_of;                              // [R], R = T * k
  int64_t top_k = 1;                                        // k
  std::optional<View<const float>> weights = std::nullopt;  // [T, k]: multiplied into the rows
  FloatView rows = {};                                      // result, [R, D], format of x
};
// With weights this is the gradient of unpermute with respect to its rows.
void permute(const PermuteArgs& args, const Exec& exec);

struct UnpermuteArgs {
  ConstFloatView rows;                                      // [R, D]
  View<const int32_t> row_of;                               // [T * k]
  std::optional<View<const float>> weights = std::nullopt;  // [T, k]; absent: all 1
  FloatView x = {};                                         // result, [T, D], format of rows
};
// Without weights this is the gradient of permute.
void unpermute(const UnpermuteArgs& args, const Exec& exec);

// dweights[t, j] = dout[t] . rows[row_of[t * k + j]], summed in f32 in a fixed order
struct UnpermuteWeightsArgs {
  ConstFloatView dout;         // [T, D]
  ConstFloatView rows;         // [R, D], format of dout
  View<const int32_t> row_of;  // [T * k]
  View<float> dweights;        // result, [T, k]
};
void unpermute_weights(const UnpermuteWeightsArgs& args, const Exec& exec);

}  // namespace moxie
