// What expert parallelism sends between ranks, in bytes. A leg is one exchange in which every rank
// has one message for every rank, itself included. A message holds rows, then numbers for pairs. A
// pair is a token and one of its experts on the rank that the message goes to or comes from. A
// token goes to a rank once, so a message to the experts has one row per token; a message from the
// experts has one row per pair, because the weighted sum is taken where the token lives.
//
//   dispatch    x, forward:   rows of tokens, and for each pair int32 (which row), f32 (its weight)
//               dy, backward: rows of tokens
//   combine     y, forward:   rows of pairs
//               dx, backward: rows of pairs, and for each pair f32 (the gradient of its weight)
//
// A row is qdata and its e8m0 scales, or unquantized elements, padded with zeros to a multiple of
// 16 bytes.
#pragma once

#include <cstdint>

#include "moxie/core/base/math.h"

namespace moxie {

// Rows are padded to a multiple of 16 bytes, the widest load and store of a GPU's thread, so that
// every row begins at such a multiple from the start of its message.
inline constexpr int64_t kWireAlignment = 16;

struct PairOfX {
  int32_t row;  // of its token in the message
  float weight;
};
inline constexpr int64_t kPairOfXBytes = sizeof(PairOfX);
inline constexpr int64_t kPairOfDxBytes = 4;  // f32 <da, a>

// Bytes of a row: its elements and, if they are quantized, their scales.
constexpr int64_t wire_row_bytes(int64_t element_bytes, int64_t scale_bytes) {
  return round_up(element_bytes + scale_bytes, kWireAlignment);
}
// Bytes of a row of `dim` e4m3 elements with a scale for every `block` of them.
constexpr int64_t fp8_row_bytes(int64_t dim, int64_t block) {
  return wire_row_bytes(dim, ceil_div(dim, block));
}
constexpr int64_t plain_row_bytes(int64_t dim, int64_t element_bytes) {
  return wire_row_bytes(dim * element_bytes, 0);
}

struct WireRows {
  int64_t to_experts = 0;    // bytes of a row of x or dy
  int64_t from_experts = 0;  // bytes of a row of y or dx
};
constexpr WireRows fp8_wire(int64_t dim, int64_t block, int64_t element_bytes) {
  return {fp8_row_bytes(dim, block), plain_row_bytes(dim, element_bytes)};
}
constexpr WireRows unquantized_wire(int64_t dim, int64_t element_bytes) {
  return {plain_row_bytes(dim, element_bytes), plain_row_bytes(dim, element_bytes)};
}

enum class Leg : uint8_t { kDispatchX, kCombineY, kDispatchDy, kCombineDx };

// Bytes of messages with this many unique tokens and pairs in total. The messages of a leg follow
// each other without gaps, so this is also the size of a leg.
constexpr int64_t message_bytes(const WireRows& wire, Leg leg, int64_t tokens, int64_t pairs) {
  switch (leg) {
    case Leg::kDispatchX: return tokens * wire.to_experts + pairs * kPairOfXBytes;
    case Leg::kCombineY: return pairs * wire.from_experts;
    case Leg::kDispatchDy: return tokens * wire.to_experts;
    case Leg::kCombineDx: return pairs * (wire.from_experts + kPairOfDxBytes);
  }
  return 0;
}

// Before the first leg each rank sends int32 counts to each rank: the number of pairs of each of
// the receiver's experts, then three more: the number of unique tokens, which gradients the
// sender's call asks for, and a number that is equal on ranks whose calls fit together
// (torch/exchange/places.h). On a CPU one int32, the number of the sender's experts, goes to each
// rank before that.
enum class BesideExperts : int64_t { kTokens, kFlags, kSignature };
inline constexpr int64_t kCountsBesideExperts = 3;
// The column of a rank's counts that holds `what`.
constexpr int64_t column_of(BesideExperts what, int64_t local_experts) {
  return local_experts + static_cast<int64_t>(what);
}

}  // namespace moxie
