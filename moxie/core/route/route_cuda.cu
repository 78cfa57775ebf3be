// A stable counting sort in three launches: counts of each piece of slots, where each piece of each
// expert begins, and the rows. No atomics on the order: the same ids give the same rows.
#include "moxie/core/base/cuda.cuh"
#include "moxie/core/route/backends.h"

namespace moxie::cuda {
namespace {

struct RouteParams {
  const int32_t* ids;
  int32_t *offs, *slot_of, *row_of;
  int32_t* piece;  // [pieces, experts]: counts, then first rows
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
    p.piece[piece * p.experts + e] = counts[e];
}

// One CTA. Each thread adds up the pieces of its experts; then experts are scanned.
__global__ __launch_bounds__(kThreads) void scan_kernel(const __grid_constant__ RouteParams p) {
  __shared__ int32_t ends[kMaxGroups];
  for (int64_t e = threadIdx.x; e < p.experts; e += kThreads) {
    int32_t total = 0;
    for (int64_t piece = 0; piece < p.pieces; ++piece) total += p.piece[piece * p.experts + e];
    ends[e] = total;
  }
  __syncthreads();
  if (threadIdx.x == 0)
    for (int64_t e = 1; e < p.experts; ++e) ends[e] += ends[e - 1];
  __syncthreads();
  for (int64_t e = threadIdx.x; e < p.experts; e += kThreads) {
    p.offs[e] = ends[e];
    int32_t first = e > 0 ? ends[e - 1] : 0;
    for (int64_t piece = 0; piece < p.pieces; ++piece) {
      int32_t& at = p.piece[piece * p.experts + e];
      const int32_t count = at;
      at = first;
      first += count;
    }
  }
}

__global__ __launch_bounds__(kThreads) void place_kernel(const __grid_constant__ RouteParams p) {
  __shared__ int32_t expert[kRoutePiece];
  const int64_t piece = work_index(), begin = piece * kRoutePiece;
  if (piece >= p.pieces) return;
  const int count = static_cast<int>(min<int64_t>(kRoutePiece, p.slots - begin));
  for (int i = threadIdx.x; i < count; i += kThreads) expert[i] = expert_of(p, begin + i);
  __syncthreads();
  for (int i = threadIdx.x; i < count; i += kThreads) {
    int32_t rank = 0;  // among the slots of this piece and expert
    for (int j = 0; j < i; ++j) rank += expert[j] == expert[i];
    const int32_t row = p.piece[piece * p.experts + expert[i]] + rank;
    p.row_of[begin + i] = row;
    p.slot_of[row] = static_cast<int32_t>(begin + i);
  }
}

struct TopKParams {
  const float* scores;
  int32_t* ids;
  int64_t tokens, experts, k;
};

// One warp per token: k times the best of what is left, which comes after the one before it.
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
      if (best < 0 || ranks_before(score, e, best_score, best)) best_score = score, best = e;
    }
    for (int step = kWarp / 2; step > 0; step /= 2) {
      const float other_score = __shfl_xor_sync(~0u, best_score, step);
      const int32_t other = __shfl_xor_sync(~0u, best, step);
      if (other >= 0 && (best < 0 || ranks_before(other_score, other, best_score, best)))
        best_score = other_score, best = other;
    }
    last_score = best_score, last_id = best;
    if (lane == 0) p.ids[token * p.k + j] = best;
  }
}

}  // namespace

void route(const RouteArgs& args, void* stream) {
  const RouteParams params{.ids = args.ids.data,
                           .offs = args.offs.data,
                           .slot_of = args.slot_of.data,
                           .row_of = args.row_of.data,
                           .piece = args.workspace.data,
                           .slots = numel(args.ids.shape),
                           .experts = args.offs.dim(0),
                           .pieces = ceil_div<int64_t>(numel(args.ids.shape), kRoutePiece)};
  launch({"route", stream, params.pieces}, count_kernel, params);
  launch({"route", stream, 1}, scan_kernel, params);
  launch({"route", stream, params.pieces}, place_kernel, params);
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
