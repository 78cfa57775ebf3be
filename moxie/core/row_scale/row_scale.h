// quantize_row_scale: the quantizer of the fp8_rowwise recipe. One power-of-two f32 scale per row
// (rowwise form) or per column of a group (colwise form), so a GEMM applies it once, at its end.
#pragma once

#include "moxie/core/format/bf16.h"
#include "moxie/core/format/f32_scale.h"
#include "moxie/core/layout/check_args.h"

namespace moxie {

struct RowScaleOut {
  View<e4m3> qdata;
  View<float> scale;  // decode: x ~ qdata * scale
};

struct RowScaleArgs {
  ConstFloatView x;  // tokens [R, C] or weights [G, N, K]
  OptionalOffs offs = std::nullopt;
  std::optional<RowScaleOut> rowwise = std::nullopt;  // qdata: shape of x; scale [R] or [G, N]
  // Tokens: qdata_t [C, padded R], groups padded to kRowScaleAlignment, and scale_t [G, C].
  // Weights: [G, K, N] and [G, K]. The scales of an empty group are 0.
  std::optional<RowScaleOut> colwise = std::nullopt;
};

void quantize_row_scale(const RowScaleArgs& args, const Exec& exec);

}  // namespace moxie
