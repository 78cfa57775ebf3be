// requantize: the rowwise form of x -> its colwise form, directly from FP8. Bit-equal to dequantize
// to f32 and quantize, without the f32 tensor in memory. Activations that arrive quantized need no
// bf16 copy for wgrad.
#pragma once

#include "moxie/core/format/bf16.h"
#include "moxie/core/layout/check_args.h"

namespace moxie {

struct RequantizeArgs {
  Block block;                                    // of the rowwise form
  ScaleLayout from_layout = ScaleLayout::kPlain;  // of `scale`; colwise has its own
  View<const e4m3> qdata;                         // [R, C] or [G, N, K]
  View<const e8m0> scale;
  OptionalOffs offs = std::nullopt;  // [G], tokens only
  QuantizedOut colwise = {};         // result, qdata_t [C, padded R] or [G, K, N]
  ScaleRule rule = ScaleRule::kRceil;
};

void requantize(const RequantizeArgs& args, const Exec& exec);

}  // namespace moxie
