// requantize: the rowwise form of x -> its colwise form, directly from FP8. Bit-equal to dequantize
// to f32 and quantize, without the f32 tensor in memory. Activations that arrive quantized need no
// bf16 copy for wgrad.
#pragma once

#include "moxie/core/copy_rows/copy_rows.h"
#include "moxie/core/format/bf16.h"
#include "moxie/core/layout/check_args.h"

namespace moxie {

struct RequantizeArgs {
  Block block;                                    // of the rowwise form
  ScaleLayout from_layout = ScaleLayout::kPlain;  // of `scale`; colwise has its own
  View<const e4m3> qdata;  // [R, C] or [G, N, K]; if rows lie apart only its shape counts
  View<const e8m0> scale;
  OptionalOffs offs = std::nullopt;  // [G], tokens only
  QuantizedOut colwise = {};         // result, qdata_t [C, padded R] or [G, K, N]
  ScaleRule rule = ScaleRule::kRceil;
  // Rows of tokens that lie apart; only if can_gather().
  std::optional<RowsIn<const std::byte>> apart = std::nullopt;
};

void requantize(const RequantizeArgs& args, const Exec& exec);

// Whether requantize() of this backend and GPU reads rows that lie apart. Elsewhere copy_rows()
// must put them together first.
bool can_gather(const RequantizeArgs& args, const Exec& exec);

}  // namespace moxie
