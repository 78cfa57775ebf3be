// The form in which tokens travel between ranks, and what products make of it.
#pragma once

#include "moxie/torch/autograd/expert_mlp.h"

namespace moxie::ops::mlp {

enum class Wire : int64_t { kUnquantized, kFp8 };
// Refuses FP8 for recipes that do not quantize all three passes in blocks of a row.
Wire parse_wire(std::string_view text, const Recipe& recipe);

// Tokens as they travel: with plain scales in FP8.
Quantized for_wire(const Plan& plan, Wire wire, Role role, const Tensor& tokens);

// The operands of rows that were received.
QuantizedForms forms_of_received(const FormsWanted& wanted, const Quantized& rows);
// The layout in which a pass takes scales that came plain: Hopper puts them in order itself.
ScaleLayout layout_of_received(const Plan& plan);

}  // namespace moxie::ops::mlp
