// MxTensor holds activations that the caller has quantized (received from another rank, or made by
// an earlier kernel) and what grouped_mm needs to take them. Python's MXTensor holds the same
// parts.
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
  // The tensor that autograd sees: it has the original's shape and dtype, and one element of
  // memory. Gradients arrive here in that dtype, never in FP8. from_qdata_and_scales() leaves it
  // without grad: call requires_grad_() on it to get a gradient.
  at::Tensor proxy;

  at::ScalarType dtype() const { return proxy.scalar_type(); }

  static MxTensor from_qdata_and_scales(at::Tensor qdata, at::Tensor scale, at::ScalarType dtype,
                                        std::string_view block = "1x32");
  // Quantizes x. Differentiable: the gradient passes to x unchanged.
  static MxTensor to_mx(const at::Tensor& x, std::string_view block = "1x32",
                        std::string_view rule = "rceil");
  // Checks dtypes, devices and shapes of the parts.
  void check(const char* op) const;
  at::Tensor dequantize() const;  // in dtype(); differentiable
};

namespace ops {

// grouped_mm of an x that is quantized already, in the recipe's block for activations. Forward
// multiplies x as it is; wgrad requantizes it.
at::Tensor grouped_mm(const MxTensor& x, const at::Tensor& w, const GroupedMmOptions& options = {});

}  // namespace ops
}  // namespace moxie
