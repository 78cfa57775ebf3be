// Places in three launches: find the expert of every slot and count tokens by rank in each piece;
// one CTA sends counts to all ranks, meets them and finds where everything begins; assign rows and
// send pairs. Atomics decide nothing, so the same route gives the same places.
#include "moxie/core/base/scan.cuh"
#include "moxie/core/exchange/backends.h"
#include "moxie/core/exchange/meet.cuh"

namespace moxie::cuda {
namespace {

struct PlacesParams {
  Peers peers;
  ExchangeLimits limits;
  const int32_t *offs, *row_of;
  const float* weights;
  int32_t *expert, *row, *token;  // by slot
  int32_t *experts_out, *own;
  int32_t* piece;  // [ranks, pieces]: tokens for the rank; after the scan, those before the piece
  int32_t* first;  // [ranks]: the place of this rank's first token there
  int32_t* shift;  // [experts]
  int64_t slots, tokens, top_k, pieces;
  int32_t signature;

  __device__ int32_t row_at(int64_t slot) const {
    return min<int32_t>(max<int32_t>(row_of[slot], 0), static_cast<int32_t>(slots) - 1);
  }
};

// The first expert whose rows end after this one.
__device__ int expert_of(const int32_t* ends, int experts, int32_t row) {
  int low = 0, high = experts - 1;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (ends[middle] > row)
      high = middle;
    else
      low = middle + 1;
  }
  return low;
}

constexpr int kMaskBits = 32;
constexpr int kMaskWords = (kMaxRanks + kMaskBits - 1) / kMaskBits;

static_assert(kExchangePiece == kThreads, "a thread per token");

// The place of each token among those of its piece that go to the same rank.
__global__ __launch_bounds__(kThreads) void count_kernel(const __grid_constant__ PlacesParams p) {
  __shared__ int32_t ends[kMaxGroups];
  __shared__ int32_t counts[kWarps][kMaxRanks];
  if (work_index() >= p.pieces) return;
  const int experts = static_cast<int>(p.peers.capacity.experts);
  for (int e = threadIdx.x; e < experts; e += kThreads) ends[e] = p.offs[e];
  __syncthreads();
  const int64_t token = work_index() * kThreads + threadIdx.x;
  const int64_t begin = token * p.top_k;
  const int64_t end = token < p.tokens ? begin + p.top_k : begin;
  uint32_t mask[kMaskWords] = {};
  for (int64_t slot = begin; slot < end; ++slot) {
    const int e = expert_of(ends, experts, p.row_at(slot)), rank = e / p.peers.local_experts;
    p.expert[slot] = e;
#pragma unroll
    for (int i = 0; i < kMaskWords; ++i)
      if (rank / kMaskBits == i) mask[i] |= 1u << rank % kMaskBits;
  }
  const auto goes = [&](int rank) {
    uint32_t word = 0;
#pragma unroll
    for (int i = 0; i < kMaskWords; ++i)
      if (rank / kMaskBits == i) word = mask[i];
    return (word >> rank % kMaskBits & 1) != 0;
  };
  for (int rank = 0; rank < p.peers.ranks; ++rank) {
    const unsigned all = __ballot_sync(~0u, goes(rank));
    if (lane_index() == 0) counts[warp_index()][rank] = __popc(all);
  }
  __syncthreads();
  for (int rank = threadIdx.x; rank < p.peers.ranks; rank += kThreads) {
    int32_t sum = 0;
    for (int warp = 0; warp < kWarps; ++warp) sum += counts[warp][rank];
    p.piece[rank * p.pieces + work_index()] = sum;
  }
  for (int rank = 0; rank < p.peers.ranks; ++rank) {
    const unsigned all = __ballot_sync(~0u, goes(rank));
    if (!goes(rank)) continue;
    int32_t place = __popc(all & ((1u << lane_index()) - 1));
    for (int warp = 0; warp < warp_index(); ++warp) place += counts[warp][rank];
    bool is_first = true;
    for (int64_t slot = begin; slot < end; ++slot)
      if (p.expert[slot] / p.peers.local_experts == rank) {
        p.token[slot] = is_first ? place : -1 - place;
        is_first = false;
      }
  }
}

struct MeetStorage {
  int32_t unique[kMaxRanks];   // tokens of this rank for each rank
  int32_t before[kMaxGroups];  // rows of an expert that come from ranks before this one
  int32_t total[kMaxGroups];
};

// Exclusive prefix sums of the pieces' tokens, by destination. One warp per rank.
__device__ void scan_pieces(const PlacesParams& p, MeetStorage& s) {
  for (int rank = warp_index(); rank < p.peers.ranks; rank += kWarps) {
    int32_t* const counts = p.piece + rank * p.pieces;
    int32_t before = 0;
    for (int64_t first = 0; first < p.pieces; first += kWarp) {
      const int64_t i = first + lane_index();
      const int32_t count = i < p.pieces ? counts[i] : 0;
      const int32_t upto = scan_warp(count);
      if (i < p.pieces) counts[i] = before + upto - count;
      before += __shfl_sync(~0u, upto, kWarp - 1);
    }
    if (lane_index() == 0) s.unique[rank] = before;
  }
}

__device__ void send_counts(const PlacesParams& p, const MeetStorage& s) {
  const int experts = static_cast<int>(p.peers.capacity.experts);
  const int fields = static_cast<int>(counts_of(p.peers.capacity));
  for (int i = threadIdx.x; i < p.peers.ranks * fields; i += kThreads) {
    const int field = i % fields, unique = field - experts;
    int32_t value = p.signature;
    if (field < experts)
      value = p.offs[field] - (field > 0 ? p.offs[field - 1] : 0);
    else if (unique < p.peers.ranks)
      value = s.unique[unique];
    p.peers.region<int32_t>(i / fields, p.peers.at.counts)[p.peers.rank * fields + field] = value;
  }
}

// Every rank finds the same failure. One thread.
__device__ void check_counts(const PlacesParams& p, const MeetStorage& s, const int32_t* counts) {
  const int experts = static_cast<int>(p.peers.capacity.experts), local = p.peers.local_experts;
  const int fields = static_cast<int>(counts_of(p.peers.capacity));
  constexpr auto kStep = static_cast<int64_t>(Step::kCounts);
  for (int r = 0; r < p.peers.ranks; ++r) {
    const int signature = experts + p.peers.ranks;
    if (counts[r * fields + signature] != counts[signature])
      fail(p.peers, Failure::kSignature, {.step = kStep, .rank = r});
    int64_t rows = 0, tokens = 0;
    for (int e = r * local; e < (r + 1) * local; ++e) rows += s.total[e];
    for (int from = 0; from < p.peers.ranks; ++from) tokens += counts[from * fields + experts + r];
    if (rows > p.limits.rows)
      fail(p.peers, Failure::kRows,
           {.step = kStep, .rank = r, .value = rows, .limit = p.limits.rows});
    if (tokens > p.limits.tokens)
      fail(p.peers, Failure::kTokens,
           {.step = kStep, .rank = r, .value = tokens, .limit = p.limits.tokens});
  }
}

// After a failure: a row for every expert, of one token, so that NaN reaches every gradient.
__device__ void places_of_failure(const PlacesParams& p) {
  const int local = p.peers.local_experts;
  for (int i = threadIdx.x; i < local; i += kThreads) {
    p.experts_out[i] = static_cast<int32_t>(min<int64_t>(i + 1, p.limits.rows));
    p.experts_out[local + i] = p.experts_out[2 * local + i] = 0;
  }
  if (threadIdx.x == 0) {
    p.experts_out[3 * local] = static_cast<int32_t>(min<int64_t>(1, p.limits.tokens));
    p.experts_out[3 * local + 1] = p.experts_out[3 * local + 2] = 0;
  }
}

__global__ __launch_bounds__(kThreads) void meet_kernel(const __grid_constant__ PlacesParams p) {
  __shared__ MeetStorage s;
  const int experts = static_cast<int>(p.peers.capacity.experts), local = p.peers.local_experts;
  const int fields = static_cast<int>(counts_of(p.peers.capacity));
  scan_pieces(p, s);
  __syncthreads();
  // Not after a failure: a peer may still read the counts of the barrier before.
  if (!p.peers.has_failed()) send_counts(p, s);
  meet(p.peers, Step::kCounts);
  const int32_t* const counts = p.peers.own<int32_t>(p.peers.at.counts);
  for (int e = threadIdx.x; e < experts; e += kThreads) {
    int32_t before = 0, total = 0;
    for (int r = 0; r < p.peers.ranks; ++r) {
      if (r == p.peers.rank) before = total;
      total += counts[r * fields + e];
    }
    s.before[e] = before, s.total[e] = total;
  }
  __syncthreads();
  if (threadIdx.x == 0) check_counts(p, s, counts);
  __syncthreads();
  if (*const_cast<volatile uint64_t*>(&p.peers.meeting(p.peers.rank).failure) != 0)
    return places_of_failure(p);
  const int rank = static_cast<int>(threadIdx.x);
  if (rank >= p.peers.ranks) return;
  int32_t begin = 0;
  for (int e = rank * local; e < (rank + 1) * local; ++e) {
    const int32_t of_own = begin + s.before[e], own_begin = e > 0 ? p.offs[e - 1] : 0;
    p.shift[e] = of_own - own_begin;
    if (rank == p.peers.rank) {
      const int i = e - rank * local;
      p.experts_out[i] = begin + s.total[e];
      p.experts_out[local + i] = of_own;
      p.experts_out[2 * local + i] = of_own + p.offs[e] - own_begin;
    }
    begin += s.total[e];
  }
  int32_t tokens = 0;
  for (int r = 0; r < p.peers.ranks; ++r) {
    if (r == p.peers.rank) p.first[rank] = tokens;
    tokens += counts[r * fields + experts + rank];
  }
  if (rank == p.peers.rank) {
    p.experts_out[3 * local] = tokens;
    p.experts_out[3 * local + 1] = p.first[rank];
    p.experts_out[3 * local + 2] = p.first[rank] + s.unique[rank];
  }
}

// One thread per slot.
__global__ __launch_bounds__(kThreads) void place_kernel(const __grid_constant__ PlacesParams p) {
  const int64_t slot = work_index() * kThreads + threadIdx.x;
  if (slot >= p.slots) return;
  if (p.peers.has_failed()) {
    p.expert[slot] = p.row[slot] = p.token[slot] = 0;
    return;
  }
  const int e = p.expert[slot], rank = e / p.peers.local_experts;
  const int32_t local = p.token[slot];
  const int32_t place = (local < 0 ? -1 - local : local) + p.first[rank] +
                        p.piece[rank * p.pieces + slot / p.top_k / kExchangePiece];
  const int32_t row = p.row_at(slot) + p.shift[e];
  p.row[slot] = row;
  p.token[slot] = local < 0 ? -1 - place : place;
  if (local >= 0 && rank == p.peers.rank)
    p.own[place - p.first[rank]] = static_cast<int32_t>(slot / p.top_k);
  if (row < 0 || row >= p.limits.rows) return;  // offs and row_of that do not belong together
  p.peers.region<int32_t>(rank, p.peers.at.row_token)[row] = place;
  p.peers.region<float>(rank, p.peers.at.row_weight)[row] = p.weights[slot];
}

__global__ __launch_bounds__(kThreads) void only_meet_kernel(
    const __grid_constant__ MeetParams params) {
  meet(params.peers, params.step);
}

}  // namespace

void launch_meet(const char* op, const SharedMemory& memory, Step step, void* stream) {
  launch({op, stream, 1}, only_meet_kernel, MeetParams{peers_of(memory), step});
}

void exchange_places(const ExchangePlacesArgs& args, void* stream) {
  constexpr const char* kOp = "exchange_places";
  const int64_t slots = args.slots.dim(1), tokens = args.weights.dim(0);
  const int64_t pieces = ceil_div(tokens, kExchangePiece), ranks = args.memory.capacity.ranks;
  const PlacesParams params{.peers = peers_of(args.memory),
                            .limits = args.limits,
                            .offs = args.offs.data,
                            .row_of = args.row_of.data,
                            .weights = args.weights.data,
                            .expert = args.slots.data,
                            .row = args.slots.data + slots,
                            .token = args.slots.data + 2 * slots,
                            .experts_out = args.experts.data,
                            .own = args.own.data,
                            .piece = args.workspace.data,
                            .first = args.workspace.data + ranks * pieces,
                            .shift = args.workspace.data + ranks * (pieces + 1),
                            .slots = slots,
                            .tokens = tokens,
                            .top_k = args.weights.dim(1),
                            .pieces = pieces,
                            .signature = args.signature};
  launch({kOp, stream, pieces}, count_kernel, params);
  launch({kOp, stream, 1}, meet_kernel, params);
  launch({kOp, stream, ceil_div<int64_t>(slots, kThreads)}, place_kernel, params);
}

}  // namespace moxie::cuda
