// To how many places a token goes. A place is an equal, contiguous share of the experts: a rank, or
// all the ranks of an NVLink domain. A router without preferences is assumed.
#pragma once

#include <cstdint>

namespace moxie {

// `top_k` of `experts`. With groups, as in DeepSeek-V3: the experts lie in `groups` equal groups,
// and only those of `kept_groups` can be chosen: the groups with the largest sums of two best
// scores.
struct RoutingOdds {
  int64_t experts = 256;
  int64_t top_k = 8;
  int64_t groups = 1;
  int64_t kept_groups = 1;
};

// The expected number of different places among a token's `top_k` experts. `places` divides
// `experts`. Exact without groups; with them the mean of random tokens, the same on every call.
double unique_places(const RoutingOdds& odds, int64_t places);

}  // namespace moxie
