// sent_places: in which slot a token visits a rank for the first time; the route of these visits to
// the ranks, a stable sort, which is the order of the messages; then a thread per pair.
// received_places: one launch, because the device waits for the host here. Every CTA scans the
// counts of all experts, a few KB, in its shared memory.
#include "moxie/core/base/cuda.cuh"
#include "moxie/core/base/scan.cuh"
#include "moxie/core/message_places/backends.h"

namespace moxie::cuda {
namespace {

// The first i of `count` with ends(i) > at; the last one if there is none.
template <class Ends>
__device__ int first_past(int count, int32_t at, Ends&& ends) {
  int low = 0, high = count - 1;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (ends(middle) > at)
      high = middle;
    else
      low = middle + 1;
  }
  return low;
}

struct SentParams {
  const int32_t *offs, *slot_of, *row_of;
  int32_t* visits;  // [T, k]: the rank of the slot's expert; `ranks` if an earlier slot goes there
  const int32_t *visit_offs, *visit_slot_of, *visit_row_of;  // the route of visits
  int32_t* counts;
  int64_t* token_of;
  int32_t* row_in_message;
  int64_t slots, top_k;
  int ranks, local;
  int32_t flags, signature;

  __device__ int rank_of(int32_t row) const {
    return first_past(ranks, row, [&](int rank) { return offs[(rank + 1) * local - 1]; });
  }
  __device__ int32_t first_visit(int rank) const { return rank > 0 ? visit_offs[rank - 1] : 0; }
};

__global__ __launch_bounds__(kThreads) void visits_kernel(const __grid_constant__ SentParams p) {
  const int64_t begin = (work_index() * kThreads + threadIdx.x) * p.top_k;
  if (begin >= p.slots) return;
  for (int64_t j = 0; j < p.top_k; ++j) {
    const int rank = p.rank_of(p.row_of[begin + j]);
    bool is_first = true;
    for (int64_t i = 0; i < j; ++i) is_first = is_first && p.visits[begin + i] != rank;
    p.visits[begin + j] = is_first ? rank : p.ranks;
  }
}

__device__ int32_t count_of(const SentParams& p, int rank, int field) {
  if (field < p.local) {
    const int expert = rank * p.local + field;
    return p.offs[expert] - (expert > 0 ? p.offs[expert - 1] : 0);
  }
  switch (static_cast<BesideExperts>(field - p.local)) {
    case BesideExperts::kTokens: return p.visit_offs[rank] - p.first_visit(rank);
    case BesideExperts::kFlags: return p.flags;
    case BesideExperts::kSignature: return p.signature;
  }
  return 0;
}

// A thread per count, and per pair.
__global__ __launch_bounds__(kThreads) void sent_kernel(const __grid_constant__ SentParams p) {
  const int64_t i = work_index() * kThreads + threadIdx.x;
  const int fields = p.local + static_cast<int>(kCountsBesideExperts);
  if (i < static_cast<int64_t>(p.ranks) * fields)
    p.counts[i] = count_of(p, static_cast<int>(i / fields), static_cast<int>(i % fields));
  if (i >= p.slots) return;
  p.token_of[i] = i < p.visit_offs[p.ranks - 1] ? p.visit_slot_of[i] / p.top_k : 0;
  const int64_t slot = min<int64_t>(max<int64_t>(p.slot_of[i], 0), p.slots - 1);
  const int64_t begin = slot / p.top_k * p.top_k;
  const int rank = p.rank_of(static_cast<int32_t>(i));
  int32_t row = 0;
  for (int64_t j = begin; j < begin + p.top_k; ++j)
    if (p.visits[j] == rank) row = p.visit_row_of[j] - p.first_visit(rank);
  p.row_in_message[i] = row;
}

struct ReceivedParams {
  const int32_t* counts;
  const std::byte* messages;
  int64_t message_bytes, row_bytes;
  int32_t* offs;
  int64_t *row_of_arrival, *token_of;
  float* weights;
  int64_t pairs;
  int ranks, local;
};

struct ReceivedStorage {
  int32_t end[kMaxGroups];      // of the rows of an expert from a rank, by expert, then rank
  int32_t arrival[kMaxGroups];  // where these pairs begin, by arrival
  int32_t tokens[kMaxGroups];   // from this rank and those before
};

// torch aligns the messages, and rows and pairs are multiples of 8 bytes.
__device__ PairOfX load_pair(const std::byte* from) {
  const uint2 bits = *reinterpret_cast<const uint2*>(from);
  return {static_cast<int32_t>(bits.x), __uint_as_float(bits.y)};
}
static_assert(sizeof(uint2) == kPairOfXBytes && kWireAlignment % sizeof(uint2) == 0);

// Pairs of one CTA: the fewer CTAs, the fewer scan the same counts.
constexpr int64_t kPairsOfCta = 8 * kThreads;

__global__ __launch_bounds__(kThreads) void received_kernel(
    const __grid_constant__ ReceivedParams p) {
  __shared__ ReceivedStorage s;
  const int fields = p.local + static_cast<int>(kCountsBesideExperts), all = p.ranks * p.local;
  scan_cta(
      all, [&](int i) { return p.counts[i % p.ranks * fields + i / p.ranks]; },
      [&](int i, int32_t before, int32_t count) { s.end[i] = before + count; });
  scan_cta(
      all, [&](int i) { return p.counts[i / p.local * fields + i % p.local]; },
      [&](int i, int32_t before, int32_t) {
        s.arrival[i % p.local * p.ranks + i / p.local] = before;
      });
  scan_cta(
      p.ranks,
      [&](int r) { return p.counts[r * fields + column_of(BesideExperts::kTokens, p.local)]; },
      [&](int r, int32_t before, int32_t count) { s.tokens[r] = before + count; });
  if (work_index() == 0)
    for (int e = threadIdx.x; e < p.local; e += kThreads) p.offs[e] = s.end[(e + 1) * p.ranks - 1];
  const int64_t begin = work_index() * kPairsOfCta;
  const int64_t end = min<int64_t>(begin + kPairsOfCta, min<int64_t>(p.pairs, s.end[all - 1]));
  for (int64_t row = begin + threadIdx.x; row < end; row += kThreads) {
    const int i = first_past(all, static_cast<int32_t>(row), [&](int at) { return s.end[at]; });
    const int64_t arrival = s.arrival[i] + row - (i > 0 ? s.end[i - 1] : 0);
    const int rank = i % p.ranks;
    // All pairs of earlier ranks and all tokens up to this rank's lie before it.
    const int64_t at = s.tokens[rank] * p.row_bytes + arrival * kPairOfXBytes;
    PairOfX pair{};
    if (arrival >= 0 && arrival < p.pairs && at >= 0 && at <= p.message_bytes - kPairOfXBytes) {
      p.row_of_arrival[arrival] = row;
      pair = load_pair(p.messages + at);
    }
    p.token_of[row] = (rank > 0 ? s.tokens[rank - 1] : 0) + pair.row;
    p.weights[row] = pair.weight;
  }
}

}  // namespace

void sent_places(const SentPlacesArgs& args, void* stream) {
  constexpr const char* kOp = "sent_places";
  const int64_t slots = numel(args.row_of.shape), tokens = args.row_of.dim(0);
  int32_t *const visits = args.workspace.data, *const visit_slot_of = visits + slots;
  int32_t *const visit_row_of = visit_slot_of + slots, *const visit_offs = visit_row_of + slots;
  int32_t* const of_route = visit_offs + args.ranks + 1;
  const SentParams params{.offs = args.offs.data,
                          .slot_of = args.slot_of.data,
                          .row_of = args.row_of.data,
                          .visits = visits,
                          .visit_offs = visit_offs,
                          .visit_slot_of = visit_slot_of,
                          .visit_row_of = visit_row_of,
                          .counts = args.counts.data,
                          .token_of = args.token_of.data,
                          .row_in_message = args.row_in_message.data,
                          .slots = slots,
                          .top_k = args.row_of.dim(1),
                          .ranks = static_cast<int>(args.ranks),
                          .local = static_cast<int>(args.offs.dim(0) / args.ranks),
                          .flags = args.flags,
                          .signature = args.signature};
  launch({kOp, stream, ceil_div<int64_t>(tokens, kThreads)}, visits_kernel, params);
  route({.ids = {visits, args.row_of.shape},
         .offs = {visit_offs, {args.ranks + 1}},
         .slot_of = {visit_slot_of, {slots}},
         .row_of = {visit_row_of, {slots}},
         .workspace = {of_route, {route_workspace<int64_t>(slots, args.ranks + 1)}}},
        {.backend = Backend::kCuda, .stream = stream});
  launch({kOp, stream, ceil_div<int64_t>(max(slots, numel(args.counts.shape)), kThreads)},
         sent_kernel, params);
}

void received_places(const ReceivedPlacesArgs& args, void* stream) {
  const int64_t pairs = args.row_of_arrival.dim(0);
  const ReceivedParams params{.counts = args.counts.data,
                              .messages = args.messages.data,
                              .message_bytes = args.messages.dim(0),
                              .row_bytes = args.row_bytes,
                              .offs = args.offs.data,
                              .row_of_arrival = args.row_of_arrival.data,
                              .token_of = args.token_of.data,
                              .weights = args.weights.data,
                              .pairs = pairs,
                              .ranks = static_cast<int>(args.counts.dim(0)),
                              .local = static_cast<int>(args.counts.dim(1) - kCountsBesideExperts)};
  // Without pairs the ends must still be stored.
  launch({"received_places", stream, max<int64_t>(ceil_div(pairs, kPairsOfCta), 1)},
         received_kernel, params);
}

}  // namespace moxie::cuda
