// The ranks that a token goes to, as addresses of its row there. One warp per token.
#pragma once

#include "moxie/core/exchange/meet.cuh"
#include "moxie/core/route/route.h"

namespace moxie::cuda {

struct TokenSlots {
  const int32_t *expert, *token;  // by slot
  int64_t top_k;
  int64_t limit;      // of tokens that a rank receives
  int64_t row_bytes;  // in the shared memory
};

struct Destinations {
  int peers;    // addresses that were stored
  bool is_own;  // the token goes to this rank, too
};

__device__ inline Destinations find_destinations(const Peers& peers, const TokenSlots& slots,
                                                 int64_t token, std::byte** to) {
  Destinations found{};
  for (int64_t first = 0; first < slots.top_k; first += kWarp) {
    const int64_t j = first + lane_index(), slot = token * slots.top_k + j;
    const int32_t place = j < slots.top_k ? slots.token[slot] : -1;
    const int rank = j < slots.top_k ? slots.expert[slot] / peers.local_experts : peers.rank;
    const bool goes = place >= 0 && place < slots.limit;
    const unsigned all = __ballot_sync(~0u, goes && rank != peers.rank);
    if (goes && rank != peers.rank)
      to[found.peers + __popc(all & ((1u << lane_index()) - 1))] =
          peers.region<std::byte>(rank, peers.at.tokens) + place * slots.row_bytes;
    found.peers += __popc(all);
    found.is_own |= __any_sync(~0u, goes && rank == peers.rank) != 0;
  }
  __syncwarp();
  return found;
}

inline TokenSlots token_slots(const View<const int32_t>& slots, int64_t tokens, int64_t limit,
                              int64_t row_bytes) {
  return {.expert = slots.data,
          .token = slots.data + 2 * slots.dim(1),
          .top_k = tokens ? slots.dim(1) / tokens : 0,
          .limit = limit,
          .row_bytes = row_bytes};
}

}  // namespace moxie::cuda
