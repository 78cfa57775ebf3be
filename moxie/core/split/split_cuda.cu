// A thread splits one value, or four neighbours if every row is aligned to 16 bytes. The last CTAs
// make the copies.
#include "moxie/core/base/cuda.cuh"
#include "moxie/core/split/backends.h"
#include "moxie/core/split/vector.cuh"

namespace moxie::cuda {
namespace {

struct Params {
  const float* x;
  bf16* out;
  SplitTerms terms;
  int64_t vectors;  // of kVector values
  int64_t cols;
  int64_t split_ctas;
  const bf16* copied;
  bf16* copies;
  int64_t copied_vectors;  // of kVector values; 0: no copies
  int num_copies;
};

template <int kVector>
__device__ void copy(const Params& p, int64_t i) {
  if (i >= p.copied_vectors) return;
  const auto values = load<kVector>(p.copied + i * kVector);
  for (int n = 0; n < p.num_copies; ++n)
    store(p.copies + (n * p.copied_vectors + i) * kVector, values);
}

template <int kVector>
__global__ __launch_bounds__(kThreads) void split_kernel(const __grid_constant__ Params p) {
  const int64_t cta = work_index(), i = cta * kThreads + threadIdx.x;
  if (cta >= p.split_ctas) return copy<kVector>(p, i - p.split_ctas * kThreads);
  if (i >= p.vectors) return;
  const auto x = load<kVector>(p.x + i * kVector);
  Vector<bf16, kVector> terms[kBf16Terms];
#pragma unroll
  for (int v = 0; v < kVector; ++v) {
    const auto of_value = bf16_terms(x.value[v]);
#pragma unroll
    for (int t = 0; t < kBf16Terms; ++t) terms[t].value[v] = of_value[t];
  }
  const int64_t row = i * kVector / p.cols, col = i * kVector - row * p.cols;
  bf16* const out = p.out + row * p.terms.count * p.cols + col;
#pragma unroll
  for (int j = 0; j < kMaxSplitTerms; ++j) {
    if (j >= p.terms.count) break;
    const int t = p.terms.term[j];  // chosen by comparison, as registers cannot be indexed
    store(out + j * p.cols, t == 0 ? terms[0] : t == 1 ? terms[1] : terms[2]);
  }
}

template <int kVector>
void launch_split(Params params, int64_t values, int64_t copied, void* stream) {
  const auto ctas = [](int64_t vectors) { return ceil_div<int64_t>(vectors, kThreads); };
  params.vectors = values / kVector;
  params.copied_vectors = copied / kVector;
  params.split_ctas = ctas(params.vectors);
  launch({"split_bf16", stream, params.split_ctas + ctas(params.copied_vectors)},
         split_kernel<kVector>, params);
}

}  // namespace

void split(const SplitArgs& args, void* stream) {
  Params params{};
  params.x = args.x.data;
  params.out = args.out.data;
  params.terms = args.terms;
  params.cols = args.x.dim(1);
  bool is_wide =
      params.cols % kWideVector == 0 && is_wide_aligned(params.x) && is_wide_aligned(params.out);
  int64_t copied = 0;
  if (const auto& copies = args.copies) {
    copied = numel(copies->x.shape);
    params.copied = copies->x.data;
    params.copies = copies->out.data;
    params.num_copies = static_cast<int>(copies->out.dim(0) / copies->x.dim(0));
    is_wide = is_wide && copied % kWideVector == 0 && is_wide_aligned(params.copied) &&
              is_wide_aligned(params.copies);
  }
  const auto run = is_wide ? launch_split<kWideVector> : launch_split<1>;
  run(params, numel(args.x.shape), copied, stream);
}

}  // namespace moxie::cuda
