// The form in which tokens travel between ranks, and what products make of it.
#pragma once

#include "moxie/torch/autograd/expert_mlp.h"
#include "moxie/torch/exchange/messages.h"

namespace moxie::ops::mlp {

enum class Wire : int64_t { kUnquantized, kFp8 };
// Refuses FP8 for recipes that do not quantize all three passes in blocks of a row.
Wire parse_wire(std::string_view text, const Recipe& recipe);

// Tokens as they travel: with plain scales in FP8.
Quantized for_wire(const Plan& plan, Wire wire, Role role, const Tensor& tokens);

// The operands of rows that were received.
QuantizedForms forms_of_received(const FormsWanted& wanted, const Quantized& rows);
// The colwise form of FP8 tokens of which rows are made: row r of the experts is row r of `data`,
// whose index leads to the token. nullopt: this device cannot, so copy the rows first.
struct ReceivedRows {
  RowPlaces data, scale;
  int64_t columns, scale_columns;
};
std::optional<Quantized> colwise_of_received(const FormsWanted& wanted, const ReceivedRows& rows);
// The layout in which a pass takes scales that came plain: Hopper puts them in order itself.
ScaleLayout layout_of_received(const Plan& plan);

}  // namespace moxie::ops::mlp
