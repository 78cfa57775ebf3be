// The spec as loops.
#include <algorithm>
#include <cstring>
#include <vector>

#include "moxie/core/message_places/backends.h"

namespace moxie::ref {

void sent_places(const SentPlacesArgs& args) {
  const int64_t tokens = args.row_of.dim(0), top_k = args.row_of.dim(1), slots = tokens * top_k;
  const int64_t experts = args.offs.dim(0), local = experts / args.ranks;
  const auto rank_of = [&](int32_t row) {
    const int32_t *ends = args.offs.data, *end = ends + experts;
    const int64_t expert = std::upper_bound(ends, end, row) - ends;
    return std::min(expert, experts - 1) / local;
  };
  // row[t * ranks + r]: the row of token t in the message to rank r; -1: it does not go there
  std::vector<int32_t> row(tokens * args.ranks, -1);
  for (int64_t slot = 0; slot < slots; ++slot)
    row[slot / top_k * args.ranks + rank_of(args.row_of.data[slot])] = 0;
  int64_t sent = 0;
  for (int64_t r = 0; r < args.ranks; ++r) {
    int32_t in_message = 0;
    for (int64_t t = 0; t < tokens; ++t) {
      if (row[t * args.ranks + r] < 0) continue;
      row[t * args.ranks + r] = in_message++;
      args.token_of.data[sent++] = t;
    }
    int32_t* const counts = args.counts.data + r * (local + kCountsBesideExperts);
    for (int64_t e = 0; e < local; ++e) {
      const int64_t expert = r * local + e;
      counts[e] = args.offs.data[expert] - (expert > 0 ? args.offs.data[expert - 1] : 0);
    }
    counts[column_of(BesideExperts::kTokens, local)] = in_message;
    counts[column_of(BesideExperts::kFlags, local)] = args.flags;
    counts[column_of(BesideExperts::kSignature, local)] = args.signature;
  }
  std::fill(args.token_of.data + sent, args.token_of.data + slots, 0);
  for (int64_t i = 0; i < slots; ++i) {
    const int64_t token = args.slot_of.data[i] / top_k;
    args.row_in_message.data[i] =
        std::max(row[token * args.ranks + rank_of(static_cast<int32_t>(i))], 0);
  }
}

void received_places(const ReceivedPlacesArgs& args) {
  const int64_t ranks = args.counts.dim(0), fields = args.counts.dim(1);
  const int64_t local = fields - kCountsBesideExperts;
  std::vector<int64_t> arrival(ranks * local);  // where the pairs of a rank for an expert begin
  std::vector<int64_t> behind(ranks);           // the byte at which arrival 0 would be, by rank
  int64_t pairs = 0, tokens = 0;
  for (int64_t r = 0; r < ranks; ++r) {
    const int32_t* const counts = args.counts.data + r * fields;
    for (int64_t e = 0; e < local; ++e) {
      arrival[r * local + e] = pairs;
      pairs += counts[e];
    }
    tokens += counts[column_of(BesideExperts::kTokens, local)];
    behind[r] = tokens * args.row_bytes;
  }
  int64_t row = 0;
  for (int64_t e = 0; e < local; ++e) {
    int64_t first = 0;
    for (int64_t r = 0; r < ranks; ++r) {
      const int32_t* const counts = args.counts.data + r * fields;
      for (int32_t i = 0; i < counts[e]; ++i, ++row) {
        const int64_t at = arrival[r * local + e] + i;
        args.row_of_arrival.data[at] = row;
        PairOfX pair;
        std::memcpy(&pair, args.messages.data + behind[r] + at * kPairOfXBytes, sizeof(pair));
        args.token_of.data[row] = first + pair.row;
        args.weights.data[row] = pair.weight;
      }
      first += counts[column_of(BesideExperts::kTokens, local)];
    }
    args.offs.data[e] = static_cast<int32_t>(row);
  }
}

}  // namespace moxie::ref
