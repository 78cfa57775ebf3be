// The forms of a quantized result: what every op that quantizes by blocks returns.
#pragma once

#include "moxie/core/quantize/quantize.h"
#include "moxie/torch/view.h"

namespace moxie::ops {

struct FormsRequest {
  const char* op;
  SymShape x;  // of what is quantized
  const OptionalTensor& offs;
  std::optional<Block> rowwise, colwise;
  ScaleRule rule;
  ScaleLayout layout;
};

// Names as the user gave them. rowwise and colwise are blocks; an argument is called block where
// there is one.
struct FormsText {
  std::optional<std::string_view> rowwise, colwise;
  std::string_view rule, layout;
};
FormsRequest parse_forms(const char* op, const SymShape& x, const OptionalTensor& offs,
                         const FormsText& text);

// Checks all that can be checked without data, and says what comes back. Every overload and every
// device goes through here, Meta too, so the shapes that are traced are the shapes that run.
Results forms_results(const FormsRequest& request);

// The same tensors as the core takes them; offs are dense.
QuantizeForms forms_in(const FormsRequest& request, const OptionalTensor& offs,
                       const std::vector<Tensor>& out);

}  // namespace moxie::ops
