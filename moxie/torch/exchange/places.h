// Where the rows of one call over a group go. A rank sends each of its tokens once to every rank
// that holds one of its experts; for each pair of token and expert, one row comes back
// (core/layout/wire.h).
//
// Ranks hold equally many experts, in order: the first rank the first ones. The sender orders its
// pairs as route() does, by expert, then token, so that the pairs for one rank are neighbours; rows
// come back in the same order. The receiver gets pairs ordered by the sender's rank, then expert.
// It orders the rows of each expert by the sender's rank, then token, which is the order that one
// process with all tokens would give them.
#pragma once

#include <c10/core/Event.h>

#include <optional>

#include "moxie/torch/exchange/group.h"
#include "moxie/torch/view.h"

namespace moxie::ops {

// The number of tokens and of (token, expert) pairs that go to, or come from, each rank.
struct Traffic {
  std::vector<int64_t> tokens, pairs;

  int64_t num_tokens() const;
  int64_t num_pairs() const;
};

struct Places {
  Traffic out, in;  // out: tokens sent, rows that return; in: tokens received, rows sent back
  Tensor token_of;  // int64 [out tokens]: the token in each row of the messages that are sent
  // receive_pairs() (legs.h) finds these two.
  Tensor row_of_arrival;  // int64 [in pairs]: by arrival, the row of the experts for the pair
  Tensor offs;            // int32 [local experts]: the ends of the rows of this rank's experts
};

// What each rank tells the others about its call, besides the counts.
struct CallFlags {
  bool autograd = false;  // it records a graph and will run backward
  bool dx = false;        // it wants the gradient of x
  bool dweights = false;  // it wants the gradient of its routing weights
  bool db2 = false;       // it wants the gradient of b2
  int32_t signature = 0;  // hash of what must be equal on all ranks: recipe, wire, ..
};

struct RouteOfTokens {
  const Tensor& offs;     // int32 [E], for the experts of all ranks
  const Tensor& slot_of;  // int32 [R]
  const Tensor& row_of;   // int32 [T * k]
  int64_t top_k;
  int64_t local_experts;
};

// A copy to the host that has been issued, but not waited for. From a GPU it goes to pinned memory,
// on the current stream, and an event marks its end: until wait() the host queues other work.
class CopyToHost {
 public:
  explicit CopyToHost(const Tensor& from);
  const Tensor& wait() const;

 private:
  Tensor source_;  // kept so that it is not freed while it is copied
  Tensor host_;
  std::optional<c10::Event> done_;
};

struct Agreed {
  Places places;
  Tensor counts;    // that were received
  CallFlags flags;  // combined: dx, dweights and db2 are true if any rank wants them
};

// Exchanges the counts and copies them to the host, because messages need sizes. The constructor
// only queues; wait() is the only point at which a call waits for the device, so work that needs no
// sizes belongs between them. wait() throws on every rank if their flags do not fit together.
class CountsExchange {
 public:
  CountsExchange(const Group& group, const char* op, const RouteOfTokens& route,
                 const CallFlags& flags);
  // int32 [R]: for each pair that is sent, the row of its token in the message.
  const Tensor& row_in_message() const { return row_in_message_; }
  Agreed wait();

 private:
  const Group& group_;
  const char* op_;
  CallFlags flags_;
  Places places_;
  Tensor row_in_message_;
  Tensor received_;  // the counts
  std::optional<CopyToHost> copy_;
};

}  // namespace moxie::ops
