// One warp per token: lane i holds the logits of experts i, i + 32, ... in registers. Exponentials
// are computed in f64: that costs little beside the GEMM that made the logits, and gives the same
// ids as a CPU.
#include <type_traits>

#include "moxie/core/base/cuda.cuh"
#include "moxie/core/route/rank.h"
#include "moxie/core/select/backends.h"
#include "moxie/core/select/weighting.h"

namespace moxie::cuda {
namespace {

// A warp takes several tokens, so that the CTA zeroes and adds its counts once for all of them.
constexpr int kTokensOfWarp = 8;
constexpr int kSlotsOfLane = kMaxTopK / kWarp;
static_assert(kMaxTopK % kWarp == 0);

struct SelectParams {
  const float *logits, *bias;
  int32_t* ids;
  float* weights;
  int64_t* counts;  // nullptr: not wanted
  Weighting weighting;
  int64_t tokens;
  int32_t experts, k;
};

struct BackwardParams {
  const float *dweights, *logits;
  const int32_t* ids;
  float* dlogits;
  Weighting weighting;
  int64_t tokens;
  int32_t experts, k;
};

__device__ double sum_over_warp(double value) {
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) value += __shfl_xor_sync(~0u, value, step);
  return value;
}

__device__ double decay(float logit) { return exp(-fabs(static_cast<double>(logit))); }

// A token's logits, kValues of them per lane.
template <int kValues>
struct Logits {
  float value[kValues];

  __device__ Logits(const float* logits, int32_t experts) {
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      const int32_t e = expert(i);
      value[i] = e < experts ? logits[e] : 0;
    }
  }
  __device__ static int32_t expert(int i) { return i * kWarp + lane_index(); }
};

template <int kValues>
struct Softmax {
  double largest, sum = 0;
  double power[kValues];  // exp(logit - largest) of this lane's experts

  __device__ Softmax(const Logits<kValues>& logits, int32_t experts) {
    float most = -INFINITY;
#pragma unroll
    for (int i = 0; i < kValues; ++i)
      if (logits.expert(i) < experts) most = fmaxf(most, logits.value[i]);
#pragma unroll
    for (int step = kWarp / 2; step > 0; step /= 2)
      most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
    largest = most;
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      power[i] = logits.expert(i) < experts ? exp(logits.value[i] - largest) : 0;
      sum += power[i];
    }
    sum = sum_over_warp(sum);
  }
  __device__ double of_lane(int i) const { return power[i] / sum; }
  __device__ double of(float logit) const { return exp(logit - largest) / sum; }
};

template <int kValues>
__device__ void score_all(const SelectParams& p, const Logits<kValues>& logits,
                          float (&scores)[kValues]) {
  if (p.weighting.score == Score::kSoftmax) {
    const Softmax<kValues> softmax(logits, p.experts);
#pragma unroll
    for (int i = 0; i < kValues; ++i) scores[i] = static_cast<float>(softmax.of_lane(i));
  } else {
#pragma unroll
    for (int i = 0; i < kValues; ++i)
      scores[i] = static_cast<float>(sigmoid(logits.value[i], decay(logits.value[i])));
  }
}

// Selects the experts of a token. All lanes of a warp must call it. `counts` is the CTA's, in
// shared memory.
template <int kValues>
__device__ void select_token(const SelectParams& p, int64_t token, int32_t* counts) {
  const Logits<kValues> logits(p.logits + token * p.experts, p.experts);
  float scores[kValues];
  score_all(p, logits, scores);
  uint32_t keys[kValues];  // 0: expert does not exist, or is chosen already
#pragma unroll
  for (int i = 0; i < kValues; ++i) {
    const int32_t e = logits.expert(i);
    const float bias = p.bias && e < p.experts ? p.bias[e] : 0;
    keys[i] = e < p.experts ? rank_key(p.bias ? scores[i] + bias : scores[i]) : 0;
  }
  int32_t my_id[kSlotsOfLane] = {};
  float my_score[kSlotsOfLane] = {};
  double total = 0;
  for (int32_t j = 0; j < p.k; ++j) {
    uint32_t best_key = 0;
    int32_t best = std::numeric_limits<int32_t>::max();
    float best_score = 0;
#pragma unroll
    for (int i = 0; i < kValues; ++i)
      if (keys[i] > best_key) {
        best_key = keys[i];
        best = logits.expert(i);
        best_score = scores[i];
      }
    const uint32_t top = __reduce_max_sync(~0u, best_key);
    const int32_t id =
        __reduce_min_sync(~0u, best_key == top ? best : std::numeric_limits<int32_t>::max());
    const float score = __shfl_sync(~0u, best_score, id % kWarp);
    total += score;
#pragma unroll
    for (int i = 0; i < kValues; ++i)
      if (logits.expert(i) == id) keys[i] = 0;
#pragma unroll
    for (int i = 0; i < kSlotsOfLane; ++i)
      if (j == i * kWarp + lane_index()) {
        my_id[i] = id;
        my_score[i] = score;
      }
  }
#pragma unroll
  for (int i = 0; i < kSlotsOfLane; ++i) {
    const int32_t j = i * kWarp + lane_index();
    if (j >= p.k) break;
    p.ids[token * p.k + j] = my_id[i];
    p.weights[token * p.k + j] = weight_of(my_score[i], total, p.weighting);
    atomicAdd(&counts[my_id[i]], 1);
  }
}

template <int kValues>
__global__ __launch_bounds__(kThreads) void select_kernel(const __grid_constant__ SelectParams p) {
  __shared__ int32_t counts[kMaxGroups];
  for (int32_t e = threadIdx.x; e < p.experts; e += kThreads) counts[e] = 0;
  __syncthreads();
  const int64_t first = (work_index() * kWarps + warp_index()) * kTokensOfWarp;
  const int64_t last = min<int64_t>(first + kTokensOfWarp, p.tokens);
  for (int64_t token = first; token < last; ++token) select_token<kValues>(p, token, counts);
  __syncthreads();
  if (!p.counts) return;
  // CTAs may add in any order, because integer sums do not depend on it.
  for (int32_t e = threadIdx.x; e < p.experts; e += kThreads)
    if (counts[e] != 0)
      atomicAdd(reinterpret_cast<unsigned long long*>(&p.counts[e]),
                static_cast<unsigned long long>(counts[e]));
}

// One of the token's slots; a lane holds up to two. Slots from k on do not exist.
struct Slot {
  int32_t id = 0;
  bool exists = false;
  float dweight = 0, logit = 0;
  double score = 0;
};

template <int kValues>
__global__ __launch_bounds__(kThreads) void select_backward_kernel(
    const __grid_constant__ BackwardParams p) {
  const int64_t token = work_index() * kWarps + warp_index();
  if (token >= p.tokens) return;
  const float* const from = p.logits + token * p.experts;
  float* const to = p.dlogits + token * p.experts;
  const Weighting& how = p.weighting;
  const bool is_softmax = how.score == Score::kSoftmax;
  const Logits<kValues> logits(from, p.experts);
  const Softmax<kValues> softmax(logits, is_softmax ? p.experts : 0);

  Slot slots[kSlotsOfLane];
  SlotSums sums;
#pragma unroll
  for (int i = 0; i < kSlotsOfLane; ++i) {
    Slot& slot = slots[i];
    const int32_t j = i * kWarp + lane_index();
    slot.exists = j < p.k;
    if (!slot.exists) continue;
    slot.id = min<int32_t>(max<int32_t>(p.ids[token * p.k + j], 0), p.experts - 1);
    slot.dweight = p.dweights[token * p.k + j];
    slot.logit = from[slot.id];
    slot.score = is_softmax ? softmax.of(slot.logit) : sigmoid(slot.logit, decay(slot.logit));
    sums.total += slot.score;
    sums.dot += slot.dweight * slot.score;
  }
  sums = {.total = sum_over_warp(sums.total), .dot = sum_over_warp(sums.dot)};

  const double shift = softmax_shift(sums, how);
#pragma unroll
  for (int i = 0; i < kValues; ++i)
    if (logits.expert(i) < p.experts)
      to[logits.expert(i)] = is_softmax ? softmax_dlogit(softmax.of_lane(i), 0, shift) : 0;
  __syncwarp();  // the chosen experts' gradients overwrite some of these below
#pragma unroll
  for (const Slot& slot : slots) {
    if (!slot.exists) continue;
    const double dscore = dscore_of(slot.dweight, sums, how);
    to[slot.id] = is_softmax ? softmax_dlogit(slot.score, dscore, shift)
                             : static_cast<float>(dscore * sigmoid_slope(decay(slot.logit)));
  }
}

// Calls run(n) with the number n of logits per lane, as a compile-time constant.
template <class Run>
void with_values(int64_t experts, const Run& run) {
  const int64_t values = ceil_div<int64_t>(experts, kWarp);
  if (values <= 1) return run(std::integral_constant<int, 1>{});
  if (values <= 2) return run(std::integral_constant<int, 2>{});
  if (values <= 4) return run(std::integral_constant<int, 4>{});
  if (values <= 8) return run(std::integral_constant<int, 8>{});
  if (values <= 16) return run(std::integral_constant<int, 16>{});
  static_assert(kMaxGroups <= 32 * kWarp);
  run(std::integral_constant<int, 32>{});
}

}  // namespace

void select(const SelectArgs& args, void* stream) {
  const bool counts = args.how_counts != Counts::kNotWanted;
  const SelectParams params{.logits = args.logits.data,
                            .bias = args.bias ? args.bias->data : nullptr,
                            .ids = args.ids.data,
                            .weights = args.weights.data,
                            .counts = counts ? args.counts.data : nullptr,
                            .weighting = args.weighting,
                            .tokens = args.logits.dim(0),
                            .experts = static_cast<int32_t>(args.logits.dim(1)),
                            .k = static_cast<int32_t>(args.ids.dim(1))};
  const Launch how{"select_experts", stream,
                   ceil_div<int64_t>(params.tokens, kWarps * kTokensOfWarp)};
  if (args.how_counts == Counts::kOverwritten)
    zero_async(how, params.counts, params.experts * static_cast<int64_t>(sizeof(int64_t)));
  with_values(params.experts,
              [&](auto values) { launch(how, select_kernel<values.value>, params); });
}

void select_backward(const SelectBackwardArgs& args, void* stream) {
  const BackwardParams params{.dweights = args.dweights.data,
                              .logits = args.logits.data,
                              .ids = args.ids.data,
                              .dlogits = args.dlogits.data,
                              .weighting = args.weighting,
                              .tokens = args.logits.dim(0),
                              .experts = static_cast<int32_t>(args.logits.dim(1)),
                              .k = static_cast<int32_t>(args.ids.dim(1))};
  const Launch how{"select_experts", stream, ceil_div<int64_t>(params.tokens, kWarps)};
  with_values(params.experts,
              [&](auto values) { launch(how, select_backward_kernel<values.value>, params); });
}

}  // namespace moxie::cuda
