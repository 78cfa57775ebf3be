// dequantize: an operand back to x in bf16 or f32: qdata * scale in f32, then rounded to nearest
// even if bf16 is asked for. The inverse of either form of quantize, in the order of x again.
#pragma once

#include "moxie/core/format/bf16.h"
#include "moxie/core/layout/check_args.h"

namespace moxie {

struct DequantizeArgs {
  Form form = Form::kRowwise;
  Block block = {};  // rows x cols of x
  ScaleLayout layout = ScaleLayout::kPlain;
  View<const e4m3> qdata;            // [R, C] or [G, N, K]; colwise [C, padded R] or [G, K, N]
  View<const e8m0> scale;            // operand_shape() has its shape
  OptionalOffs offs = std::nullopt;  // [G], tokens only
  FloatView x = {};                  // result, [R, C] or [G, N, K]; rows that no group covers are 0
};

void dequantize(const DequantizeArgs& args, const Exec& exec);

}  // namespace moxie
