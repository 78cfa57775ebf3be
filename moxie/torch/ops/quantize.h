// The quantizers with types instead of text: ops call them after they have parsed their text or
// unpacked their integer. On Meta tensors they only check and allocate.
#pragma once

#include "moxie/core/quantize/quantize.h"
#include "moxie/torch/recipe.h"
#include "moxie/torch/view.h"

namespace moxie::ops {

// Which forms a quantizer makes of a tensor, and how. A graph carries it as one integer (bits.h).
struct QuantizeSpec {
  Scaling scaling = Scaling::kBlock;  // or kRow, where any block means that the form is wanted
  std::optional<Block> rowwise = std::nullopt, colwise = std::nullopt;
  ScaleRule rule = ScaleRule::kRceil;
  ScaleLayout layout = ScaleLayout::kPlain;
  bool scales_too_small = false;  // for the recipe broken_scales

  template <class Self, class F>
  static void fields(Self& self, F&& f) {
    f(self.scaling, 2);
    f(self.rowwise);
    f(self.colwise);
    f(self.rule, 2);
    f(self.layout, 2);
    f(self.scales_too_small, 1);
  }
};

// How requantize reads the rowwise form and writes the colwise one.
struct RequantizeSpec {
  Block block;              // of the rowwise form, which is read
  ScaleLayout from_layout;  // of its scales
  Block colwise;            // of the colwise form, which is written
  ScaleRule rule;
  ScaleLayout layout;  // of the scales that are written

  template <class Self, class F>
  static void fields(Self& self, F&& f) {
    f(self.block);
    f(self.from_layout, 2);
    f(self.colwise);
    f(self.rule, 2);
    f(self.layout, 2);
  }
};

// How to convert the plain scales of tokens that the caller has quantized.
struct TokenScaleSpec {
  Block block;         // 1x32 or 1x128: the block of the scales that are read
  ScaleLayout layout;  // of the result: plain or swizzled

  template <class Self, class F>
  static void fields(Self& self, F&& f) {
    f(self.block);
    f(self.layout, 2);
  }
};

// The input of forms_results(), with the op's name for error messages.
struct FormsArgs {
  const char* op;
  SymShape x;  // the shape of what is quantized, which need not be in memory
  const OptionalTensor& offs;
  const QuantizeSpec& spec;
};

// Checks everything that does not depend on data, and returns the shapes of the results: qdata and
// scale if the spec has a rowwise form, qdata_t and scale_t if it has a colwise one. Every overload
// and device (Meta too) calls this, so that traced shapes equal real shapes.
Results forms_results(const FormsArgs& args);

// Views the allocated results as the core takes them; offs must be dense.
QuantizeForms forms_in(const QuantizeSpec& spec, const OptionalTensor& offs,
                       const std::vector<Tensor>& out);

// Quantizes x [R, C] or [G, N, K], bf16 or f32, to new tensors or into given ones, in the order of
// forms_results().
std::vector<Tensor> quantize(const char* op, const Tensor& x, const OptionalTensor& offs,
                             const QuantizeSpec& spec);
void quantize_into(const char* op, const Tensor& x, const OptionalTensor& offs,
                   const QuantizeSpec& spec, const std::vector<Tensor>& out);

// The arguments of a quantizing op as text. An op with only one block calls that argument `block`.
struct QuantizeText {
  std::optional<std::string_view> rowwise, colwise;
  std::string_view rule, layout;
};
QuantizeSpec parse_forms(const char* op, const QuantizeText& text);

inline std::tuple<Tensor, Tensor> two(const std::vector<Tensor>& out) { return {out[0], out[1]}; }
inline std::tuple<Tensor, Tensor, Tensor, Tensor> four(const std::vector<Tensor>& out) {
  return {out[0], out[1], out[2], out[3]};
}

}  // namespace moxie::ops
