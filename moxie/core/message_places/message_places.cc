#include "moxie/core/message_places/message_places.h"

#include <limits>

#include "moxie/core/base/check.h"
#include "moxie/core/base/dispatch.h"
#include "moxie/core/message_places/backends.h"

namespace moxie {
namespace {

void check_ranks(const char* op, int64_t experts, int64_t ranks) {
  // The route of the visits has one group more than ranks.
  MOXIE_CHECK(ranks >= 1 && ranks < kMaxGroups, op, ": there must be 1 to ", kMaxGroups - 1,
              " ranks, got ", ranks);
  MOXIE_CHECK(experts >= ranks && experts % ranks == 0 && experts <= kMaxGroups, op,
              ": there must be at most ", kMaxGroups, " experts, a multiple of the ", ranks,
              " ranks, got ", experts);
}

void check_slots(const char* op, const char* argument, const View<const int32_t>& numbers) {
  const int64_t slots = numel(numbers.shape);
  for (int64_t i = 0; i < slots; ++i)
    MOXIE_CHECK(numbers.data[i] >= 0 && numbers.data[i] < slots, op, ": ", argument,
                " must be 0 to ", slots - 1, ", got ", numbers.data[i], " at ", i);
}

}  // namespace

void sent_places(const SentPlacesArgs& args, const Exec& exec) {
  constexpr const char* kOp = "sent_places";
  const Shape& rows = args.row_of.shape;
  MOXIE_CHECK(args.offs.shape.dims == 1, kOp, ": offs must be [experts], got ", args.offs.shape);
  MOXIE_CHECK(rows.dims == 2 && rows[1] >= 1, kOp, ": row_of must be [tokens, top_k], got ", rows);
  const int64_t experts = args.offs.dim(0), slots = numel(rows);
  check_ranks(kOp, experts, args.ranks);
  MOXIE_CHECK(slots <= std::numeric_limits<int32_t>::max(), kOp,
              ": tokens * top_k must fit int32, got ", slots);
  check_shape(kOp, "slot_of", args.slot_of.shape, {slots});
  check_shape(kOp, "counts", args.counts.shape,
              {args.ranks, experts / args.ranks + kCountsBesideExperts});
  check_shape(kOp, "token_of", args.token_of.shape, {slots});
  check_shape(kOp, "row_in_message", args.row_in_message.shape, {slots});
  if (exec.backend == Backend::kCuda) {
    check_shape(kOp, "workspace", args.workspace.shape, {sent_places_workspace(slots, args.ranks)});
  } else {
    check_slots(kOp, "slot_of", args.slot_of);
    check_slots(kOp, "row_of", args.row_of);
  }
  // Like route(), without a cpu backend.
  dispatch(
      kOp, exec, [&] { ref::sent_places(args); },
      [&](auto stream) { cuda::sent_places(args, stream); });
}

void received_places(const ReceivedPlacesArgs& args, const Exec& exec) {
  constexpr const char* kOp = "received_places";
  MOXIE_CHECK(args.counts.shape.dims == 2 && args.counts.dim(1) > kCountsBesideExperts, kOp,
              ": counts must be [ranks, local experts + ", kCountsBesideExperts, "], got ",
              args.counts.shape);
  const int64_t ranks = args.counts.dim(0), local = args.counts.dim(1) - kCountsBesideExperts;
  check_ranks(kOp, ranks * local, ranks);
  check_shape(kOp, "offs", args.offs.shape, {local});
  const int64_t pairs = args.row_of_arrival.dim(0);
  check_shape(kOp, "token_of", args.token_of.shape, {pairs});
  check_shape(kOp, "weights", args.weights.shape, {pairs});
  MOXIE_CHECK(args.row_bytes > 0 && args.row_bytes % kWireAlignment == 0, kOp,
              ": row_bytes must be a multiple of ", kWireAlignment, ", got ", args.row_bytes);
  MOXIE_CHECK(args.messages.shape.dims == 1, kOp, ": messages must have one dimension, got ",
              args.messages.shape);
  if (exec.backend != Backend::kCuda) {
    int64_t counted = 0, tokens = 0;
    for (int64_t r = 0; r < ranks; ++r) {
      const int32_t* const counts = args.counts.data + r * args.counts.dim(1);
      for (int64_t e = 0; e < local; ++e) counted += counts[e];
      tokens += counts[column_of(BesideExperts::kTokens, local)];
    }
    const int64_t bytes = tokens * args.row_bytes + counted * kPairOfXBytes;
    check_shape(kOp, "messages", args.messages.shape, {bytes});
    MOXIE_CHECK(counted == pairs, kOp, ": row_of_arrival must have the ", counted,
                " pairs that were counted, got ", pairs);
  }
  dispatch(
      kOp, exec, [&] { ref::received_places(args); },
      [&](auto stream) { cuda::received_places(args, stream); });
}

}  // namespace moxie
