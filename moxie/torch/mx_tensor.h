// MxTensor: quantized activations that came from elsewhere (another rank, an earlier kernel), with
// what is needed to use them. Python's MXTensor is the same four things.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <string_view>

namespace moxie {

struct MxTensor {
  at::Tensor qdata;      // e4m3 [R, C]
  at::Tensor scale;      // e8m0, plain
  std::string block;     // rows x cols that share a scale
  at::ScalarType dtype;  // of what was quantized, and of what dequantize() gives

  // Checks dtypes, devices and shapes; messages name the rule and the value.
  static MxTensor from_qdata_and_scales(at::Tensor qdata, at::Tensor scale, at::ScalarType dtype,
                                        std::string_view block = "1x32");
  static MxTensor to_mx(const at::Tensor& x, std::string_view block = "1x32",
                        std::string_view rule = "rceil");
  at::Tensor dequantize() const;
};

}  // namespace moxie
