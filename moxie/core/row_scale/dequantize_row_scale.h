// dequantize_row_scale: from an operand of quantize_row_scale back to x, in the order of x: qdata *
// scale in f32, rounded to nearest even if x is bf16.
#pragma once

#include "moxie/core/row_scale/row_scale.h"

namespace moxie {

struct DequantizeRowScaleArgs {
  Form form = Form::kRowwise;
  View<const e4m3> qdata;            // [R, C] or [G, N, K]; colwise [C, padded R] or [G, K, N]
  View<const float> scale;           // [R] or [G, N]; colwise [G, C] or [G, K]
  OptionalOffs offs = std::nullopt;  // [G], tokens only
  FloatView x = {};                  // result, [R, C] or [G, N, K]; rows that no group covers are 0
};

void dequantize_row_scale(const DequantizeRowScaleArgs& args, const Exec& exec);

}  // namespace moxie
