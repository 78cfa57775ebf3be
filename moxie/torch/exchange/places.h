// Where the rows of one call go, over a group: a rank's tokens to the ranks of their experts, a
// token once to each, and one row per pair of token and expert back (core/layout/wire.h).
//
// Ranks hold the experts in order, each as many. Pairs leave in the order of route: by expert, then
// token, so those for one rank are neighbours, and what comes back is in that order. At the
// experts' rank they arrive by rank of their token, then expert; rows of an expert are put in order
// of that rank, then token, which is the order that one process with all tokens would have.
#pragma once

#include "moxie/torch/exchange/group.h"
#include "moxie/torch/view.h"

namespace moxie::ops {

// By rank.
struct Traffic {
  std::vector<int64_t> tokens, pairs;

  int64_t num_tokens() const;
  int64_t num_pairs() const;
};

struct Places {
  Traffic out, in;        // out: tokens sent and rows expected back. in: tokens received
  Tensor token_of;        // int64 [out tokens]: which token a row of the messages is
  Tensor row_in_message;  // int32 [R]: of each pair that leaves, the row of its token
  Tensor arrival_of;      // int64 [in pairs]: of each row of the experts, the pair as it arrived
  Tensor row_of_arrival;  // int64 [in pairs]: its inverse
  Tensor offs;            // int32 [local experts]: the rows of this rank's experts
};

// What every rank says of its call beside the counts.
struct CallFlags {
  bool autograd = false;  // it will run backward
  bool dx = false;        // it wants the gradient of x, of its routing weights
  bool dweights = false;
  bool db2 = false;       // of the biases of its experts
  int32_t signature = 0;  // of what must be equal: recipe, wire, dtype, sizes
};

struct RouteOfTokens {
  const Tensor& offs;     // int32 [E], of all experts
  const Tensor& slot_of;  // int32 [R]
  const Tensor& row_of;   // int32 [T * k]
  int64_t top_k;
  int64_t local_experts;
};

// The one wait for the device: counts come to the host, because messages have sizes.
// Throws on every rank where flags do not fit together.
struct Agreed {
  Places places;
  CallFlags flags;  // of all ranks: dx, dweights and db2 where any rank wants them
};
Agreed exchange_counts(const Group& group, const char* op, const RouteOfTokens& route,
                       const CallFlags& flags);

}  // namespace moxie::ops
