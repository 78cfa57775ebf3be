// MxTensor: quantized activations that came from elsewhere (another rank, an earlier kernel), with
// what is needed to use them. Python's MXTensor holds the same.
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
  // What autograd sees: the shape and dtype of what was quantized, in one element of memory.
  // Gradients reach it in that dtype; FP8 gets none. Require them of it where there was no to_mx().
  at::Tensor proxy;

  at::ScalarType dtype() const { return proxy.scalar_type(); }

  static MxTensor from_qdata_and_scales(at::Tensor qdata, at::Tensor scale, at::ScalarType dtype,
                                        std::string_view block = "1x32");
  // Differentiable: the gradient passes to x as it is.
  static MxTensor to_mx(const at::Tensor& x, std::string_view block = "1x32",
                        std::string_view rule = "rceil");
  // Dtypes, devices and shapes of the parts; messages name op, rule and value.
  void check(const char* op) const;
  at::Tensor dequantize() const;  // in dtype(); differentiable
};

namespace ops {

// grouped_mm of an x that is quantized already, in a block that the recipe has for activations: it
// is multiplied as it is, and wgrad requantizes it.
at::Tensor grouped_mm(const MxTensor& x, const at::Tensor& w, const GroupedMmOptions& options = {});

}  // namespace ops
}  // namespace moxie
