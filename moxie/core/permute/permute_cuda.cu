#include <cuda_bf16.h>

#include "moxie/core/base/cuda.cuh"
#include "moxie/core/permute/backends.h"

namespace moxie::cuda {
namespace {

__device__ void put(float* to, float value) { *to = value; }
__device__ void put(__nv_bfloat16* to, float value) { *to = __float2bfloat16(value); }

// Indices come from the caller and are not to be trusted.
__device__ int64_t in_range(int32_t index, int64_t end) {
  return min<int64_t>(max<int64_t>(index, 0), end - 1);
}

template <class T>
struct PermuteParams {
  const T* x;
  const int32_t* slot_of;
  const float* weights;  // may be nullptr
  T* rows;
  int64_t num_rows, top_k, dim;
};

// One warp per row.
template <class T>
__global__ __launch_bounds__(kThreads) void permute_kernel(
    const __grid_constant__ PermuteParams<T> p) {
  const int64_t row = work_index() * kWarps + warp_index();
  if (row >= p.num_rows) return;
  const int64_t slot = in_range(p.slot_of[row], p.num_rows);
  const T* from = p.x + slot / p.top_k * p.dim;
  T* to = p.rows + row * p.dim;
  const float weight = p.weights ? p.weights[slot] : 1.f;
  for (int64_t d = lane_index(); d < p.dim; d += kWarp) {
    if (p.weights)
      put(to + d, static_cast<float>(from[d]) * weight);
    else
      to[d] = from[d];
  }
}

template <class T>
struct UnpermuteParams {
  const T* rows;
  const int32_t* row_of;
  const float* weights;  // may be nullptr
  T* x;
  int64_t tokens, top_k, dim;
};

// One warp per token.
template <class T>
__global__ __launch_bounds__(kThreads) void unpermute_kernel(
    const __grid_constant__ UnpermuteParams<T> p) {
  const int64_t token = work_index() * kWarps + warp_index();
  if (token >= p.tokens) return;
  const int64_t slots = p.tokens * p.top_k;
  for (int64_t d = lane_index(); d < p.dim; d += kWarp) {
    float sum = 0;
    for (int64_t slot = token * p.top_k; slot < (token + 1) * p.top_k; ++slot) {
      const auto value = static_cast<float>(p.rows[in_range(p.row_of[slot], slots) * p.dim + d]);
      // Rounded product by product, as on a CPU.
      sum = __fadd_rn(sum, p.weights ? __fmul_rn(p.weights[slot], value) : value);
    }
    put(p.x + token * p.dim + d, sum);
  }
}

template <class T>
struct WeightsParams {
  const T *dout, *rows;
  const int32_t* row_of;
  float* dweights;
  int64_t slots, top_k, dim;
};

// One warp per slot; the lanes are kDotLanes.
template <class T>
__global__ __launch_bounds__(kThreads) void weights_kernel(
    const __grid_constant__ WeightsParams<T> p) {
  static_assert(kDotLanes == kWarp);
  const int64_t slot = work_index() * kWarps + warp_index();
  if (slot >= p.slots) return;
  const T* dout = p.dout + slot / p.top_k * p.dim;
  const T* row = p.rows + in_range(p.row_of[slot], p.slots) * p.dim;
  float sum = 0;
  for (int64_t d = lane_index(); d < p.dim; d += kWarp)
    sum = __fadd_rn(sum, __fmul_rn(static_cast<float>(dout[d]), static_cast<float>(row[d])));
  for (int step = kWarp / 2; step > 0; step /= 2)
    sum = __fadd_rn(sum, __shfl_down_sync(~0u, sum, step));
  if (lane_index() == 0) p.dweights[slot] = sum;
}

template <class F>
void with_type(Format format, F&& f) {
  if (format == Format::kF32)
    f.template operator()<float>();
  else
    f.template operator()<__nv_bfloat16>();
}

int64_t ctas(int64_t warps) { return ceil_div<int64_t>(warps, kWarps); }

}  // namespace

void permute(const PermuteArgs& args, void* stream) {
  with_type(args.x.format, [&]<class T>() {
    const PermuteParams<T> params{.x = static_cast<const T*>(args.x.data),
                                  .slot_of = args.slot_of.data,
                                  .weights = args.weights ? args.weights->data : nullptr,
                                  .rows = static_cast<T*>(args.rows.data),
                                  .num_rows = args.slot_of.dim(0),
                                  .top_k = args.top_k,
                                  .dim = args.x.dim(1)};
    launch({"permute", stream, ctas(params.num_rows)}, permute_kernel<T>, params);
  });
}

void unpermute(const UnpermuteArgs& args, void* stream) {
  const int64_t tokens = args.x.dim(0);
  if (tokens == 0) return;
  with_type(args.x.format, [&]<class T>() {
    const UnpermuteParams<T> params{.rows = static_cast<const T*>(args.rows.data),
                                    .row_of = args.row_of.data,
                                    .weights = args.weights ? args.weights->data : nullptr,
                                    .x = static_cast<T*>(args.x.data),
                                    .tokens = tokens,
                                    .top_k = args.row_of.dim(0) / tokens,
                                    .dim = args.x.dim(1)};
    launch({"unpermute", stream, ctas(tokens)}, unpermute_kernel<T>, params);
  });
}

void unpermute_weights(const UnpermuteWeightsArgs& args, void* stream) {
  const int64_t tokens = args.dout.dim(0), slots = args.row_of.dim(0);
  if (tokens == 0) return;
  with_type(args.dout.format, [&]<class T>() {
    const WeightsParams<T> params{.dout = static_cast<const T*>(args.dout.data),
                                  .rows = static_cast<const T*>(args.rows.data),
                                  .row_of = args.row_of.data,
                                  .dweights = args.dweights.data,
                                  .slots = slots,
                                  .top_k = slots / tokens,
                                  .dim = args.dout.dim(1)};
    launch({"unpermute_weights", stream, ctas(slots)}, weights_kernel<T>, params);
  });
}

}  // namespace moxie::cuda
