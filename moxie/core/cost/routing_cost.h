// Computes to how many places a token goes. A place is an equal, contiguous share of the experts:
// those of one rank, or of all ranks of an NVLink domain. Assumes that the router prefers no
// expert.
#pragma once

#include <cstdint>

namespace moxie {

// A token chooses `top_k` of `experts`. With groups, as in DeepSeek-V3, the experts lie in `groups`
// equal groups, and a token chooses only from the `kept_groups` groups whose two best scores have
// the largest sums.
struct RoutingOdds {
  int64_t experts = 256;
  int64_t top_k = 8;
  int64_t groups = 1;
  int64_t kept_groups = 1;
};

// The expected number of different places among a token's `top_k` experts. `places` divides
// `experts`. Exact without groups; with groups it is the mean over random tokens, which are the
// same on every call.
double unique_places(const RoutingOdds& odds, int64_t places);

}  // namespace moxie
