// What expert parallelism sends between ranks, in bytes. A leg is one exchange in which every rank
// has one message for every rank, itself included. A message is rows, then what belongs to pairs: a
// pair is a token and one of its experts that live on one rank. A token goes to a rank once, so a
// message to the experts has as many rows as unique tokens; one from the experts has a row per
// pair, because the weighted sum is taken where the token lives.
//
//   dispatch    x, forward:   rows of tokens, and for each pair int32 (which row), f32 (its weight)
//               dy, backward: rows of tokens
//   combine     y, forward:   rows of pairs
//               dx, backward: rows of pairs, and for each pair f32 (the gradient of its weight)
//
// A row is qdata and its scales, e8m0, or elements as they are, with zeros to a multiple of 16.
#pragma once

#include <cstdint>

#include "moxie/core/base/math.h"

namespace moxie {

// What memory reads and writes at once: every row of a message begins at a multiple of it.
inline constexpr int64_t kWireAlignment = 16;

inline constexpr int64_t kPairOfXBytes = 8;   // int32 row, f32 weight
inline constexpr int64_t kPairOfDxBytes = 4;  // f32 <da, a>

// A row in e4m3 with a scale for each 1 x block.
constexpr int64_t fp8_row_bytes(int64_t dim, int64_t block) {
  return round_up(dim + ceil_div(dim, block), kWireAlignment);
}
constexpr int64_t plain_row_bytes(int64_t dim, int64_t element_bytes) {
  return round_up(dim * element_bytes, kWireAlignment);
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

// Bytes of messages with this many unique tokens and pairs. Messages follow each other without
// gaps, so this is also the size of a leg.
constexpr int64_t message_bytes(const WireRows& wire, Leg leg, int64_t tokens, int64_t pairs) {
  switch (leg) {
    case Leg::kDispatchX: return tokens * wire.to_experts + pairs * kPairOfXBytes;
    case Leg::kCombineY: return pairs * wire.from_experts;
    case Leg::kDispatchDy: return tokens * wire.to_experts;
    case Leg::kCombineDx: return pairs * (wire.from_experts + kPairOfDxBytes);
  }
  return 0;
}

// Before them each rank tells each rank how many pairs every of its experts gets, and three numbers
// more: unique tokens, and two that must fit together (exchange.h).
inline constexpr int64_t kCountsBesideExperts = 3;
constexpr int64_t counts_bytes(int64_t world_size, int64_t local_experts) {
  return world_size * (local_experts + kCountsBesideExperts) * 4;
}

}  // namespace moxie
