// route: which rows of the grouped matrix go to which token. A token t has k slots, one per chosen
// expert; slot t * k + j holds ids[t, j]. Rows are the slots in order of expert, then of token,
// then of slot, so that the same ids always give the same rows.
#pragma once

#include "moxie/core/layout/check_args.h"

namespace moxie {

struct RouteArgs {
  View<const int32_t> ids;  // [T, k], each 0 to E - 1
  View<int32_t> offs;       // result, [E] exclusive end of each expert's rows
  View<int32_t> slot_of;    // result, [T * k] the slot that a row is a copy for
  View<int32_t> row_of;     // result, [T * k] the row of a slot: the inverse
  View<int32_t> workspace;  // cuda: [route_workspace(T * k, E)]; may be empty elsewhere
};

// On a GPU an id outside 0 to E - 1 counts as the nearest one; on a CPU it is refused.
void route(const RouteArgs& args, const Exec& exec);

// int32 that the cuda backend needs: the counts of each expert, in all and in each piece of slots.
inline constexpr int64_t kRoutePiece = 1024;
template <class Int>
Int route_workspace(const Int& slots, const Int& num_experts) {
  return (ceil_div(slots, Int(kRoutePiece)) + Int(1)) * num_experts;
}

// top_k: the k largest scores of each token, the largest first, equal ones by id. NaN is the
// smallest.
struct TopKArgs {
  View<const float> scores;  // [T, E]
  View<int32_t> ids;         // result, [T, k], k <= E
};
void top_k(const TopKArgs& args, const Exec& exec);
inline constexpr int64_t kMaxTopK = 64;

}  // namespace moxie
