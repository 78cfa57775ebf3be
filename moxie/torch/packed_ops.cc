#include "moxie/torch/packed_ops.h"

#include "moxie/torch/dispatch.h"

namespace moxie::ops::packed {

using Tensors = std::vector<Tensor>;

Tensors quantize(const Tensor& x, const OptionalTensor& offs, const QuantizeSpec& spec) {
  return dispatch<"moxie::_quantize", Tensors>(x, offs, pack(spec));
}

Tensors swiglu_quantize(const Tensor& h, const OptionalTensor& offs, const QuantizeSpec& spec) {
  return dispatch<"moxie::_swiglu_quantize", Tensors>(h, offs, pack(spec));
}

Tensors swiglu_backward_quantize(const Tensor& da, const Tensor& h, const OptionalTensor& offs,
                                 const QuantizeSpec& spec) {
  return dispatch<"moxie::_swiglu_backward_quantize", Tensors>(da, h, offs, pack(spec));
}

Tensors permute_quantize(const Tensor& x, const Tensor& slot_of, int64_t top_k,
                         const OptionalTensor& offs, const QuantizeSpec& spec) {
  return dispatch<"moxie::_permute_quantize", Tensors>(x, slot_of, top_k, offs, pack(spec));
}

Tensors requantize(const Quantized& x, const OptionalTensor& offs, const RequantizeSpec& spec) {
  return dispatch<"moxie::_requantize", Tensors>(x.data, *x.scale, offs, pack(spec));
}

Tensor token_scale(const Tensor& scale, const OptionalTensor& offs, const c10::SymInt& rows,
                   const c10::SymInt& cols, const TokenScaleSpec& spec) {
  return dispatch<"moxie::_token_scale", Tensor>(scale, offs, rows, cols, pack(spec));
}

Tensor dequantize_tokens(const Quantized& x, const TokenScaleSpec& spec) {
  return dispatch<"moxie::_dequantize_tokens", Tensor>(x.data, *x.scale, pack(spec));
}

Tensor grouped_mm(const GemmArgs& args) {
  const auto& [a, b, offs, plan, dtype, bias, num_rows] = args;
  return dispatch<"moxie::grouped_mm.quantized", Tensor>(a.data, a.scale, b.data, b.scale, offs,
                                                         pack(plan), bias, dtype);
}

Tensor grouped_dgrad(const GemmArgs& args) {
  const auto& [a, b, offs, plan, dtype, bias, num_rows] = args;
  return dispatch<"moxie::grouped_dgrad.quantized", Tensor>(a.data, a.scale, b.data, b.scale, offs,
                                                            pack(plan), dtype);
}

Tensor grouped_wgrad(const GemmArgs& args) {
  const auto& [a, b, offs, plan, dtype, bias, num_rows] = args;
  return dispatch<"moxie::grouped_wgrad.quantized", Tensor>(a.data, a.scale, b.data, b.scale,
                                                            num_rows, offs, pack(plan), dtype);
}

void grouped_wgrad_add_(const Tensor& dw, const GemmArgs& args) {
  const auto& [a, b, offs, plan, dtype, bias, num_rows] = args;
  dispatch<"moxie::grouped_wgrad_add_.quantized", void>(dw, a.data, a.scale, b.data, b.scale,
                                                        num_rows, offs, pack(plan));
}

}  // namespace moxie::ops::packed
