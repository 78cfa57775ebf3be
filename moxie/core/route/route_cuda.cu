// A stable counting sort in three launches: count the experts in each piece of slots; scan the
// counts of each expert over pieces; assign rows. If there is one piece, the last is enough.
// Atomics only count, they never decide an order, so the same ids give the same rows.
#include "moxie/core/base/cuda.cuh"
#include "moxie/core/base/scan.cuh"
#include "moxie/core/route/backends.h"

namespace moxie::cuda {
namespace {

struct RouteParams {
  const int32_t* ids;
  int32_t *offs, *slot_of, *row_of;
  int32_t* piece;  // [experts, pieces]: counts; after the scan, the expert's rows in earlier pieces
  int32_t* total;  // [experts]
  int64_t slots, experts, pieces;
};

__device__ int32_t expert_of(const RouteParams& p, int64_t slot) {
  return min<int32_t>(max<int32_t>(p.ids[slot], 0), static_cast<int32_t>(p.experts) - 1);
}

__global__ __launch_bounds__(kThreads) void count_kernel(const __grid_constant__ RouteParams p) {
  __shared__ int32_t counts[kMaxGroups];
  const int64_t piece = work_index();
  if (piece >= p.pieces) return;
  for (int64_t e = threadIdx.x; e < p.experts; e += kThreads) counts[e] = 0;
  __syncthreads();
  const int64_t end = min<int64_t>((piece + 1) * kRoutePiece, p.slots);
  for (int64_t i = piece * kRoutePiece + threadIdx.x; i < end; i += kThreads)
    atomicAdd(&counts[expert_of(p, i)], 1);
  __syncthreads();
  for (int64_t e = threadIdx.x; e < p.experts; e += kThreads)
    p.piece[e * p.pieces + piece] = counts[e];
}

// One warp per expert: exclusive prefix sum of its counts over the pieces.
__global__ __launch_bounds__(kThreads) void scan_kernel(const __grid_constant__ RouteParams p) {
  const int64_t e = work_index() * kWarps + warp_index();
  if (e >= p.experts) return;
  int32_t* const counts = p.piece + e * p.pieces;
  int32_t before = 0;
  for (int64_t first = 0; first < p.pieces; first += kWarp) {
    const int64_t i = first + lane_index();
    const int32_t count = i < p.pieces ? counts[i] : 0, upto = scan_warp(count);
    if (i < p.pieces) counts[i] = before + upto - count;
    before += __shfl_sync(~0u, upto, kWarp - 1);
  }
  if (lane_index() == 0) p.total[e] = before;
}

enum class Pieces { kOne, kAny };

// Assigns a row to each slot. A warp takes 32 slots at a time and counts, for each of them, the
// earlier slots with the same expert.
template <Pieces kPieces>
__global__ __launch_bounds__(kThreads) void place_kernel(const __grid_constant__ RouteParams p) {
  constexpr int kRounds = kRoutePiece / kThreads;
  __shared__ int32_t ends[kMaxGroups];
  __shared__ int32_t counts[kWarps][kMaxGroups];
  const int64_t piece = work_index();
  if (piece >= max<int64_t>(p.pieces, 1)) return;
  for (int64_t e = threadIdx.x; e < p.experts; e += kThreads)
#pragma unroll
    for (int w = 0; w < kWarps; ++w) counts[w][e] = 0;
  __syncthreads();
  const int64_t begin = piece * kRoutePiece + warp_index() * kRounds * kWarp + lane_index();
  int32_t expert[kRounds], rank[kRounds];
#pragma unroll
  for (int i = 0; i < kRounds; ++i) {
    const int64_t slot = begin + i * kWarp;
    expert[i] = slot < p.slots ? expert_of(p, slot) : -1;
    const unsigned alike = __match_any_sync(~0u, expert[i]);
    const unsigned before = alike & ((1u << lane_index()) - 1);
    rank[i] = __popc(before);
    if (expert[i] >= 0) rank[i] += counts[warp_index()][expert[i]];
    __syncwarp();
    if (expert[i] >= 0 && before == 0) counts[warp_index()][expert[i]] += __popc(alike);
    __syncwarp();
  }
  __syncthreads();
  const auto total_of = [&](int e) {
    if (kPieces == Pieces::kAny) return p.total[e];
    int32_t total = 0;
    for (int w = 0; w < kWarps; ++w) total += counts[w][e];
    return total;
  };
  scan_cta(static_cast<int>(p.experts), total_of,
           [&](int e, int32_t before, int32_t total) { ends[e] = before + total; });
  if (piece == 0)
    for (int64_t e = threadIdx.x; e < p.experts; e += kThreads) p.offs[e] = ends[e];
#pragma unroll
  for (int i = 0; i < kRounds; ++i) {
    const int64_t slot = begin + i * kWarp;
    if (slot >= p.slots) break;
    const int32_t e = expert[i];
    int32_t row = rank[i] + (e > 0 ? ends[e - 1] : 0);
    if (kPieces == Pieces::kAny) row += p.piece[e * p.pieces + piece];
    for (int w = 0; w < warp_index(); ++w) row += counts[w][e];
    p.row_of[slot] = row;
    p.slot_of[row] = static_cast<int32_t>(slot);
  }
}

struct TopKParams {
  const float* scores;
  int32_t* ids;
  int64_t tokens, experts, k;
};

// One warp per token: k times, finds the best expert that ranks after the previous one.
__global__ __launch_bounds__(kThreads) void top_k_kernel(const __grid_constant__ TopKParams p) {
  const int64_t token = work_index() * kWarps + warp_index();
  if (token >= p.tokens) return;
  const float* scores = p.scores + token * p.experts;
  const int lane = lane_index();
  float last_score = 0;
  int32_t last_id = -1;
  for (int64_t j = 0; j < p.k; ++j) {
    float best_score = 0;
    int32_t best = -1;
    for (int32_t e = lane; e < p.experts; e += kWarp) {
      const float score = scores[e];
      if (last_id >= 0 && !ranks_before(last_score, last_id, score, e)) continue;
      if (best < 0 || ranks_before(score, e, best_score, best)) {
        best_score = score;
        best = e;
      }
    }
    for (int step = kWarp / 2; step > 0; step /= 2) {
      const float other_score = __shfl_xor_sync(~0u, best_score, step);
      const int32_t other = __shfl_xor_sync(~0u, best, step);
      if (other >= 0 && (best < 0 || ranks_before(other_score, other, best_score, best))) {
        best_score = other_score;
        best = other;
      }
    }
    last_score = best_score;
    last_id = best;
    if (lane == 0) p.ids[token * p.k + j] = best;
  }
}

}  // namespace

void route(const RouteArgs& args, void* stream) {
  const RouteParams params{.ids = args.ids.data,
                           .offs = args.offs.data,
                           .slot_of = args.slot_of.data,
                           .row_of = args.row_of.data,
                           .piece = args.workspace.data + args.offs.dim(0),
                           .total = args.workspace.data,
                           .slots = numel(args.ids.shape),
                           .experts = args.offs.dim(0),
                           .pieces = ceil_div<int64_t>(numel(args.ids.shape), kRoutePiece)};
  // Without tokens there are no pieces, but one CTA must still store the ends, which are all 0.
  if (params.pieces <= 1) return launch({"route", stream, 1}, place_kernel<Pieces::kOne>, params);
  launch({"route", stream, params.pieces}, count_kernel, params);
  launch({"route", stream, ceil_div<int64_t>(params.experts, kWarps)}, scan_kernel, params);
  launch({"route", stream, params.pieces}, place_kernel<Pieces::kAny>, params);
}

void top_k(const TopKArgs& args, void* stream) {
  const TopKParams params{.scores = args.scores.data,
                          .ids = args.ids.data,
                          .tokens = args.scores.dim(0),
                          .experts = args.scores.dim(1),
                          .k = args.ids.dim(1)};
  launch({"top_k", stream, ceil_div<int64_t>(params.tokens, kWarps)}, top_k_kernel, params);
}

}  // namespace moxie::cuda
