// dispatch and combine, the two exchanges of an expert-parallel layer. dispatch sends tokens to the
// ranks of their experts (x in forward, dy in backward), combine sends rows of the experts back (y,
// then dx). Each is the backward of the other.
//
// Each rank sends one message to every rank, in the format of core/layout/wire.h. Messages are
// bytes, because process groups do not know FP8.
#pragma once

#include <c10/core/ScalarType.h>

#include "moxie/core/layout/wire.h"
#include "moxie/torch/exchange/messages.h"
#include "moxie/torch/exchange/places.h"

namespace moxie::ops {

struct DispatchArgs {
  const Group& group;
  const Places& places;
  const Quantized& tokens;  // [T, D]; if quantized, with plain scales [T, D / block]
  const char* what;         // x or dy, for errors
};
struct Weights {
  const Tensor& of_slots;  // f32 [T, k]
  const Tensor& slot_of;   // int32 [R]
};
// The dtypes and columns of tokens and their scales.
struct TokenFormat {
  at::ScalarType data = at::kByte, scale = at::kByte;
  int64_t columns = 0, scale_columns = 0;  // scale_columns: 0 without scales

  int64_t data_bytes() const { return columns * static_cast<int64_t>(c10::elementSize(data)); }
  int64_t scale_bytes() const {
    return scale_columns * static_cast<int64_t>(c10::elementSize(scale));
  }
};
TokenFormat format_of(const Quantized& tokens);

// Tokens as they arrived. They are not copied out of the messages, which backward keeps.
struct ReceivedTokens {
  Tensor messages;  // uint8
  TokenFormat format;
  int64_t pair_bytes = 0;  // in the messages, for each pair
};
// What goes with x: for each pair, in the order of rows, the row of its token in the message and
// the bits of its f32 routing weight. int32 [R, 2].
Tensor pairs_of_x(const Tensor& row_in_message, const Weights& weights);
// pairs: undefined if none go with the tokens.
ReceivedTokens dispatch_tokens(const DispatchArgs& args, const Tensor& pairs);

// For each row of the experts, the received token that it holds, and its routing weight.
struct ReceivedPairs {
  Tensor token_of;  // int64 [in pairs]
  Tensor weights;   // f32 [in pairs]
};
// Reads the pairs that came with x, and completes the places. counts: those that were received.
ReceivedPairs receive_pairs(const ReceivedTokens& x, const Tensor& counts, Places& places);
// The rows of the experts: row r is received token row_token[r] (int64).
Quantized rows_of(const ReceivedTokens& tokens, const Places& places, const Tensor& row_token);
// The same rows where they are, from a byte of each on.
RowPlaces rows_apart(const ReceivedTokens& tokens, const Places& places, const Tensor& row_token,
                     int64_t column);

struct CombineArgs {
  const Group& group;
  const Places& places;
  const Tensor& rows;      // [in pairs, D], of the experts; undefined if only of_pairs is sent
  const Tensor& of_pairs;  // f32 [in pairs], a value per row of the experts; or undefined
  const char* what;        // y or dx
};
struct Combined {
  Tensor rows;      // [R, D], in the order of route()
  Tensor of_pairs;  // f32 [R]
};
Combined combine_rows(const CombineArgs& args);

}  // namespace moxie::ops
