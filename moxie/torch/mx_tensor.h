// MxTensor: activations that the caller has quantized (received from another rank, made by an
// earlier kernel), with what is needed to use them. Python's MXTensor holds the same.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <string_view>

#include "moxie/torch/ops.h"

namespace moxie {

struct MxTensor {
  at::Tensor qdata;   // e4m3 [R, C]
  at::Tensor scale;   // e8m0, plain
  std::string block;  // rows x cols that share a scale
  // The tensor that autograd sees: shape and dtype of the original, backed by one element of
  // memory. Gradients arrive here in that dtype, never in FP8. Without to_mx(), call
  // requires_grad_() on it.
  at::Tensor proxy;

  at::ScalarType dtype() const { return proxy.scalar_type(); }

  static MxTensor from_qdata_and_scales(at::Tensor qdata, at::Tensor scale, at::ScalarType dtype,
                                        std::string_view block = "1x32");
  // Differentiable: the gradient passes through to x unchanged.
  static MxTensor to_mx(const at::Tensor& x, std::string_view block = "1x32",
                        std::string_view rule = "rceil");
  // Checks dtypes, devices and shapes of the parts.
  void check(const char* op) const;
  at::Tensor dequantize() const;  // in dtype(); differentiable
};

namespace ops {

// grouped_mm of a quantized x, whose block must be the recipe's block of activations: it is
// multiplied as it is, and wgrad requantizes it.
at::Tensor grouped_mm(const MxTensor& x, const at::Tensor& w, const GroupedMmOptions& options = {});

}  // namespace ops
}  // namespace moxie
