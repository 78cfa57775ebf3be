// quantize: bf16 or f32 -> e4m3 elements with one e8m0 scale per block,
//   x[r, c] ~ qdata[r, c] * scale[block of (r, c)]          (rounding: NUMERICS.md, section 4)
//
// Rowwise keeps the order of x and is contracted over columns (forward, dgrad). Colwise is stored
// transposed and is contracted over rows (wgrad; dgrad for weights). Making both reads x only once.
#pragma once

#include "moxie/core/format/bf16.h"
#include "moxie/core/layout/check_args.h"

namespace moxie {

struct QuantizeArgs {
  ConstFloatView x;                                    // tokens [R, C] or weights [G, N, K]
  OptionalOffs offs = std::nullopt;                    // [G], tokens only
  std::optional<QuantizedOut> rowwise = std::nullopt;  // qdata [R, C] or [G, N, K]
  std::optional<QuantizedOut> colwise = std::nullopt;  // qdata_t [C, padded R] or [G, K, N]
  ScaleRule rule = ScaleRule::kRceil;
};

// The outputs of any op that quantizes; fused ops take this instead of QuantizeArgs.
struct QuantizeForms {
  OptionalOffs offs = std::nullopt;
  std::optional<QuantizedOut> rowwise = std::nullopt, colwise = std::nullopt;
  ScaleRule rule = ScaleRule::kRceil;
};
constexpr QuantizeForms forms_of(const QuantizeArgs& args) {
  return {args.offs, args.rowwise, args.colwise, args.rule};
}
constexpr QuantizeArgs args_of(const ConstFloatView& x, const QuantizeForms& forms) {
  return {x, forms.offs, forms.rowwise, forms.colwise, forms.rule};
}

// Checks the forms for an x of this shape, and returns its panels.
Panels check_forms(std::string_view op, const Shape& x, const QuantizeForms& forms,
                   Backend backend);

// Every byte of every result is defined: rows that no group covers, the padding of groups and the
// padding of swizzled scales are 0.
void quantize(const QuantizeArgs& args, const Exec& exec);

}  // namespace moxie
