// Where tokens and (token, expert) pairs are in the messages of expert parallelism (layout/wire.h).
// Ranks hold equally many experts, in order: the first rank the first ones.
//
// A message has each token once, in order; pairs in the order of route(), by expert, then token.
// The rows of an expert are in order of the sender's rank, then token, which is the order that one
// process with all tokens would have.
#pragma once

#include "moxie/core/layout/check_args.h"
#include "moxie/core/layout/wire.h"
#include "moxie/core/route/route.h"

namespace moxie {

// What this rank sends, from the route of its tokens to the experts of all ranks. Rows of a route
// are sorted by expert, so the pairs for one rank are neighbours.
struct SentPlacesArgs {
  View<const int32_t> offs;      // [E]
  View<const int32_t> slot_of;   // [T * k]
  View<const int32_t> row_of;    // [T, k]
  int64_t ranks;                 // of E / ranks experts each
  int32_t flags, signature;      // go with the counts
  View<int32_t> counts;          // result, [ranks, E / ranks + kCountsBesideExperts]
  View<int64_t> token_of;        // result, [T * k]: the tokens of all messages; past them, 0
  View<int32_t> row_in_message;  // result, [T * k]: the row of each pair's token in its message
  View<int32_t> workspace;       // cuda: [sent_places_workspace()]; may be empty elsewhere
};

// A route that is none is refused on a CPU. On a GPU it gives wrong places, within the messages.
void sent_places(const SentPlacesArgs& args, const Exec& exec);

// In int32: for each slot the rank that it is the first of its token to visit, and the route of
// these visits to the ranks and, for all other slots, to one more.
inline int64_t sent_places_workspace(int64_t slots, int64_t ranks) {
  return 3 * slots + ranks + 1 + route_workspace<int64_t>(slots, ranks + 1);
}

// What arrived at this rank with x, given the counts that every rank sent to it. Pairs arrive in
// order of the sender's rank, then expert.
struct ReceivedPlacesArgs {
  View<const int32_t> counts;      // [ranks, local experts + kCountsBesideExperts]
  View<const std::byte> messages;  // [bytes], of all ranks
  int64_t row_bytes;               // of a token's row in them
  View<int32_t> offs;              // result, [local experts]: ends of the rows of each expert
  View<int64_t> row_of_arrival;    // result, [pairs]: the row of each pair, by arrival
  View<int64_t> token_of;          // result, [pairs]: for each row, which received token it holds
  View<float> weights;             // result, [pairs]: for each row, its routing weight
};

void received_places(const ReceivedPlacesArgs& args, const Exec& exec);

}  // namespace moxie
