// Tensors that own their memory, and views of vectors, which keep tests short.
#pragma once

#include <optional>
#include <vector>

#include "moxie/core/quantize/quantize.h"

namespace moxie::testing {

struct Quantized {
  std::vector<e4m3> qdata;
  std::vector<e8m0> scale;
  Shape qdata_shape, scale_shape;

  Quantized(Shape x, std::optional<int64_t> groups, Form form, Block block,
            ScaleLayout layout = ScaleLayout::kPlain) {
    const auto shape = operand_shape<int64_t>(x, groups, form, block, layout);
    qdata_shape = shape.qdata, scale_shape = shape.scale;
    qdata.assign(numel(qdata_shape), e4m3{0xa5});
    scale.assign(numel(scale_shape), e8m0{0xa5});
    operand_ = {block, layout, {qdata.data(), qdata_shape}, {scale.data(), scale_shape}};
  }
  Quantized(Quantized&&) = default;
  const QuantizedOut& operand() const { return operand_; }
  e4m3 q(int64_t row, int64_t col) const { return qdata[row * qdata_shape.dim(-1) + col]; }
  e8m0 s(int64_t row, int64_t col) const { return scale[row * scale_shape.dim(-1) + col]; }

 private:
  QuantizedOut operand_;
};

inline OptionalOffs view_of(const std::vector<int32_t>& offs) {
  if (offs.empty()) return std::nullopt;
  return View<const int32_t>{offs.data(), {static_cast<int64_t>(offs.size())}};
}

inline std::optional<int64_t> groups_of(const std::vector<int32_t>& offs) {
  return offs.empty() ? std::nullopt : std::optional<int64_t>(offs.size());
}

inline ConstFloatView view_of(const std::vector<float>& x, Shape shape) {
  return {x.data(), Format::kF32, shape};
}
inline ConstFloatView view_of(const std::vector<bf16>& x, Shape shape) {
  return {x.data(), Format::kBf16, shape};
}

template <class T>
Quantized quantize_form(const std::vector<T>& x, Shape shape, Form form, Block block,
                        const std::vector<int32_t>& offs = {}, ScaleRule rule = ScaleRule::kRceil,
                        ScaleLayout layout = ScaleLayout::kPlain,
                        const Exec& exec = {.backend = Backend::kRef}) {
  Quantized out(shape, groups_of(offs), form, block, layout);
  QuantizeArgs args{.x = view_of(x, shape), .offs = view_of(offs), .rule = rule};
  (form == Form::kRowwise ? args.rowwise : args.colwise) = out.operand();
  quantize(args, exec);
  return out;
}

}  // namespace moxie::testing
