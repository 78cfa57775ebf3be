// The first CTAs round dx, the others add up dweight. A thread has one element, or four neighbours
// if all data are aligned.
#include <cuda_bf16.h>

#include "moxie/core/base/cuda.cuh"
#include "moxie/core/split/backends.h"
#include "moxie/core/split/split.h"
#include "moxie/core/split/vector.cuh"

namespace moxie::cuda {
namespace {

struct Params {
  const float* dx_from;
  const bf16* dx_add;  // may be nullptr
  bf16* dx;
  const float* terms;
  void* dweight;
  bool dweight_is_bf16;
  int64_t dx_count, dweight_count;  // elements
  int64_t dx_ctas;
};

__device__ bf16 rounded(float value) { return {__bfloat16_as_ushort(__float2bfloat16_rn(value))}; }

template <int kVector>
__device__ void round_dx(const Params& p, int64_t i) {
  const auto from = load<kVector>(p.dx_from + i);
  Vector<bf16, kVector> to;
#pragma unroll
  for (int v = 0; v < kVector; ++v) to.value[v] = rounded(from.value[v]);
  if (p.dx_add) {
    const auto add = load<kVector>(p.dx_add + i);
#pragma unroll
    for (int v = 0; v < kVector; ++v)
      to.value[v] = rounded(__fadd_rn(to_float(to.value[v]), to_float(add.value[v])));
  }
  store(p.dx + i, to);
}

template <int kVector>
__device__ void sum_dweight(const Params& p, int64_t i) {
  Vector<float, kVector> sum{};
#pragma unroll
  for (int term = 0; term < kBf16Terms; ++term) {
    const auto of_term = load<kVector>(p.terms + term * p.dweight_count + i);
#pragma unroll
    for (int v = 0; v < kVector; ++v) sum.value[v] = __fadd_rn(sum.value[v], of_term.value[v]);
  }
  if (!p.dweight_is_bf16) return store(static_cast<float*>(p.dweight) + i, sum);
  Vector<bf16, kVector> to;
#pragma unroll
  for (int v = 0; v < kVector; ++v) to.value[v] = rounded(sum.value[v]);
  store(static_cast<bf16*>(p.dweight) + i, to);
}

template <int kVector>
__global__ __launch_bounds__(kThreads) void finish_kernel(const __grid_constant__ Params p) {
  const int64_t cta = work_index();
  const bool is_dx = cta < p.dx_ctas;
  const int64_t i = ((is_dx ? cta : cta - p.dx_ctas) * kThreads + threadIdx.x) * kVector;
  if (i >= (is_dx ? p.dx_count : p.dweight_count)) return;
  if (is_dx)
    round_dx<kVector>(p, i);
  else
    sum_dweight<kVector>(p, i);
}

template <int kVector>
void launch_finish(Params params, void* stream) {
  const auto ctas = [](int64_t count) { return ceil_div<int64_t>(count, kThreads * kVector); };
  params.dx_ctas = ctas(params.dx_count);
  launch({"finish_products", stream, params.dx_ctas + ctas(params.dweight_count)},
         finish_kernel<kVector>, params);
}

}  // namespace

void finish_products(const FinishProductsArgs& args, void* stream) {
  Params params{};
  bool is_wide = true;
  if (const auto& dx = args.dx) {
    params.dx_from = dx->from.data;
    params.dx_add = dx->add ? dx->add->data : nullptr;
    params.dx = dx->to.data;
    params.dx_count = numel(dx->to.shape);
    is_wide = params.dx_count % kWideVector == 0 && is_wide_aligned(params.dx_from) &&
              is_wide_aligned(params.dx_add) && is_wide_aligned(params.dx);
  }
  if (const auto& dweight = args.dweight) {
    params.terms = dweight->terms.data;
    params.dweight = dweight->to.data;
    params.dweight_is_bf16 = dweight->to.format == Format::kBf16;
    params.dweight_count = numel(dweight->to.shape);
    is_wide = is_wide && params.dweight_count % kWideVector == 0 && is_wide_aligned(params.terms) &&
              is_wide_aligned(static_cast<const float*>(params.dweight));
  }
  const auto run = is_wide ? launch_finish<kWideVector> : launch_finish<1>;
  run(params, stream);
}

}  // namespace moxie::cuda
