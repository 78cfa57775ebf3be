// route: assigns the rows of the grouped matrix to tokens. Token t has k slots, one per chosen
// expert; slot t * k + j belongs to expert ids[t, j]. Rows are the slots sorted by expert, then by
// slot, so the same ids always give the same rows.
#pragma once

#include "moxie/core/layout/check_args.h"

namespace moxie {

struct RouteArgs {
  View<const int32_t> ids;  // [T, k], each 0 to E - 1
  View<int32_t> offs;       // result, [E] exclusive end of each expert's rows
  View<int32_t> slot_of;    // result, [T * k] the slot of each row
  View<int32_t> row_of;     // result, [T * k] the row of each slot: the inverse
  View<int32_t> workspace;  // cuda: [route_workspace(T * k, E)]; may be empty elsewhere
};

// An id outside [0, E) is refused on a CPU, and clamped on a GPU.
void route(const RouteArgs& args, const Exec& exec);

// Size in int32 of the cuda backend's workspace: counts of each expert, in total and per piece of
// kRoutePiece slots. One CTA of 256 threads counts a piece, four slots per thread.
inline constexpr int64_t kRoutePiece = 1024;
template <class Int>
Int route_workspace(const Int& slots, const Int& num_experts) {
  return (ceil_div(slots, Int(kRoutePiece)) + Int(1)) * num_experts;
}

// top_k: the experts with the k largest scores of each token, in the order of rank.h.
struct TopKArgs {
  View<const float> scores;  // [T, E]
  View<int32_t> ids;         // result, [T, k], k <= E
};
void top_k(const TopKArgs& args, const Exec& exec);
inline constexpr int64_t kMaxTopK = 64;  // two of a token's slots for each lane of select's kernel

}  // namespace moxie
