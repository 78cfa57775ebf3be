#include "moxie/core/permute/backends.h"
#include "moxie/core/permute/gather_source.cuh"
#include "moxie/core/permute/sum_rows.cuh"

namespace moxie::cuda {
namespace {

template <class T>
struct PermuteParams {
  const T* x;
  const int32_t* slot_of;
  const float* weights;  // may be nullptr
  T* rows;
  int64_t num_rows, top_k, dim;
};

// One warp per row.
template <class T, bool kAligned>
__global__ __launch_bounds__(kThreads) void permute_kernel(
    const __grid_constant__ PermuteParams<T> p) {
  const int64_t row = work_index() * kWarps + warp_index();
  if (row >= p.num_rows) return;
  const int64_t slot = in_range(p.slot_of[row], p.num_rows);
  const T* from = p.x + slot / p.top_k * p.dim;
  T* to = p.rows + row * p.dim;
  const float weight = p.weights ? p.weights[slot] : 1.f;
#pragma unroll 1
  for (int64_t first = lane_index() * kFragment; first < p.dim;
       first += kWarp * kFragment * kInFlight<T>) {
    Chunk<T> chunk[kInFlight<T>];
    const auto at = [&](int i) { return first + i * kWarp * kFragment; };
    const auto left = [&](int i) { return clip(p.dim - at(i), kFragment); };
#pragma unroll
    for (int i = 0; i < kInFlight<T>; ++i) load_row<kAligned>(from + at(i), left(i), chunk[i]);
#pragma unroll
    for (int i = 0; i < kInFlight<T>; ++i) {
      if (p.weights) {
        float x[kFragment];
        to_floats(chunk[i], x);
#pragma unroll
        for (float& value : x) value *= weight;
        to_words(x, chunk[i]);
      }
      store_row<kAligned>(to + at(i), left(i), chunk[i]);
    }
  }
}

template <class T>
struct UnpermuteParams {
  const T* rows;
  const int32_t* row_of;
  SumArgs<T> sum;
};

// One warp per token.
template <class T, bool kAligned, int kSlots>
__global__ __launch_bounds__(kThreads) void unpermute_kernel(
    const __grid_constant__ UnpermuteParams<T> p) {
  const int64_t slots = p.sum.tokens * p.sum.top_k;
  const auto row_of = [&](int64_t slot) {
    return p.rows + in_range(p.row_of[slot], slots) * p.sum.dim;
  };
  sum_rows<T, kAligned, kSlots>(
      p.sum, [] { return false; }, row_of);
}

template <class T>
struct WeightsParams {
  const T *dout, *rows;
  const int32_t* row_of;
  float* dweights;
  int64_t slots, top_k, dim;
};

// Eight lanes per slot: together they load a 128-byte line of bf16. Of every kDotLanes columns a
// lane has eight neighbours, so it holds eight of the kDotLanes partial sums of the reference.
constexpr int kSlotLanes = kDotLanes / kFragment;
constexpr int kWarpSlots = kWarp / kSlotLanes;

template <class T, bool kAligned>
__global__ __launch_bounds__(kThreads) void weights_kernel(
    const __grid_constant__ WeightsParams<T> p) {
  constexpr int kSteps = kInFlight<T> / 2;
  const int part = lane_index() % kSlotLanes;
  const int64_t slot =
      (work_index() * kWarps + warp_index()) * kWarpSlots + lane_index() / kSlotLanes;
  // Lanes without a slot stay for the shuffles and repeat the last slot.
  const int64_t mine = min<int64_t>(slot, p.slots - 1);
  const T* dout = p.dout + mine / p.top_k * p.dim;
  const T* row = p.rows + in_range(p.row_of[mine], p.slots) * p.dim;
  float sum[kFragment] = {};
#pragma unroll 1
  for (int64_t first = part * kFragment; first < p.dim; first += kDotLanes * kSteps) {
    Chunk<T> a[kSteps], b[kSteps];
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const int64_t at = first + i * kDotLanes;
      const int left = clip(p.dim - at, kFragment);
      load_row<kAligned>(row + at, left, b[i]);
      load_row<kAligned>(dout + at, left, a[i]);
    }
    // Columns past the last were loaded as zeros, which do not change a sum.
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      float x[kFragment], y[kFragment];
      to_floats(a[i], x);
      to_floats(b[i], y);
#pragma unroll
      for (int e = 0; e < kFragment; ++e) sum[e] = __fadd_rn(sum[e], __fmul_rn(x[e], y[e]));
    }
  }
#pragma unroll
  for (int step = kSlotLanes / 2; step > 0; step /= 2)
#pragma unroll
    for (float& value : sum) value = __fadd_rn(value, __shfl_down_sync(~0u, value, step));
#pragma unroll
  for (int step = kFragment / 2; step > 0; step /= 2)
#pragma unroll
    for (int e = 0; e < kFragment / 2; ++e)
      if (e < step) sum[e] = __fadd_rn(sum[e], sum[e + step]);
  if (part == 0 && slot < p.slots) p.dweights[slot] = sum[0];
}

int64_t ctas(int64_t warps) { return ceil_div<int64_t>(warps, kWarps); }

}  // namespace

void permute(const PermuteArgs& args, void* stream) {
  with_format(args.x.format, [&]<class T>() {
    const PermuteParams<T> params{.x = static_cast<const T*>(args.x.data),
                                  .slot_of = args.slot_of.data,
                                  .weights = args.weights ? args.weights->data : nullptr,
                                  .rows = static_cast<T*>(args.rows.data),
                                  .num_rows = args.slot_of.dim(0),
                                  .top_k = args.top_k,
                                  .dim = args.x.dim(1)};
    const bool aligned = are_rows_aligned(params.x, params.dim, kFragment) &&
                         are_rows_aligned(params.rows, params.dim, kFragment);
    with_alignment(aligned, [&]<bool kAligned>() {
      launch({"permute", stream, ctas(params.num_rows)}, permute_kernel<T, kAligned>, params);
    });
  });
}

void unpermute(const UnpermuteArgs& args, void* stream) {
  const int64_t tokens = args.x.dim(0);
  if (tokens == 0) return;
  with_format(args.x.format, [&]<class T>() {
    const UnpermuteParams<T> params{.rows = static_cast<const T*>(args.rows.data),
                                    .row_of = args.row_of.data,
                                    .sum = {.weights = args.weights ? args.weights->data : nullptr,
                                            .x = static_cast<T*>(args.x.data),
                                            .tokens = tokens,
                                            .top_k = args.row_of.dim(0) / tokens,
                                            .dim = args.x.dim(1)}};
    const bool aligned = are_rows_aligned(params.rows, params.sum.dim, kFragment) &&
                         are_rows_aligned(params.sum.x, params.sum.dim, kFragment);
    with_sum_instance(aligned, params.sum.top_k, [&]<bool kAligned, int kSlots>() {
      launch({"unpermute", stream, ctas(tokens)}, unpermute_kernel<T, kAligned, kSlots>, params);
    });
  });
}

void unpermute_weights(const UnpermuteWeightsArgs& args, void* stream) {
  const int64_t tokens = args.dout.dim(0), slots = args.row_of.dim(0);
  if (tokens == 0 || slots == 0) return;
  with_format(args.dout.format, [&]<class T>() {
    const WeightsParams<T> params{.dout = static_cast<const T*>(args.dout.data),
                                  .rows = static_cast<const T*>(args.rows.data),
                                  .row_of = args.row_of.data,
                                  .dweights = args.dweights.data,
                                  .slots = slots,
                                  .top_k = slots / tokens,
                                  .dim = args.dout.dim(1)};
    const bool aligned = are_rows_aligned(params.dout, params.dim, kFragment) &&
                         are_rows_aligned(params.rows, params.dim, kFragment);
    with_alignment(aligned, [&]<bool kAligned>() {
      launch({"unpermute_weights", stream, ctas(ceil_div<int64_t>(slots, kWarpSlots))},
             weights_kernel<T, kAligned>, params);
    });
  });
}

}  // namespace moxie::cuda
