// The dequantizer with types instead of text, for ops that have parsed their text already.
#pragma once

#include "moxie/torch/recipe.h"
#include "moxie/torch/view.h"

namespace moxie::ops {

struct DequantizeArgs {
  const char* op;
  Form form;
  const Tensor& qdata;  // or qdata_t
  const Tensor& scale;  // or scale_t; f32 under Scaling::kRow
  const OptionalTensor& offs;
  Block block;
  std::optional<c10::SymInt> num_rows;  // colwise only: qdata_t is padded
  at::ScalarType dtype;
  ScaleLayout layout = ScaleLayout::kPlain;
  Scaling scaling = Scaling::kBlock;
};

Tensor dequantize(const DequantizeArgs& args);

}  // namespace moxie::ops
