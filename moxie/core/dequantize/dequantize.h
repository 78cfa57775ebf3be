// dequantize: from an operand back to x, as qdata * scale in f32, rounded to nearest even if x is
// bf16. It undoes either form of quantize; the result is in the order of x.
#pragma once

#include "moxie/core/format/bf16.h"
#include "moxie/core/layout/check_args.h"

namespace moxie {

struct DequantizeArgs {
  Form form = Form::kRowwise;
  Block block = {};  // rows x cols of x
  ScaleLayout layout = ScaleLayout::kPlain;
  View<const e4m3> qdata;            // [R, C] or [G, N, K]; colwise [C, padded R] or [G, K, N]
  View<const e8m0> scale;            // shape: operand_shape()
  OptionalOffs offs = std::nullopt;  // [G], tokens only
  FloatView x = {};                  // result, [R, C] or [G, N, K]; rows that no group covers are 0
};

void dequantize(const DequantizeArgs& args, const Exec& exec);

}  // namespace moxie
