// A thread splits one value, or four neighbours if every row is aligned to 16 bytes.
#include "moxie/core/base/cuda.cuh"
#include "moxie/core/split/backends.h"

namespace moxie::cuda {
namespace {

struct Params {
  const float* x;
  bf16* out;
  SplitTerms terms;
  int64_t vectors;  // of kVector values
  int64_t cols;
};

template <class T, int kVector>
struct alignas(sizeof(T) * kVector) Vector {
  T value[kVector];
};

template <int kVector>
__global__ __launch_bounds__(kThreads) void split_kernel(const __grid_constant__ Params p) {
  const int64_t i = work_index() * kThreads + threadIdx.x;
  if (i >= p.vectors) return;
  const auto x = *reinterpret_cast<const Vector<float, kVector>*>(p.x + i * kVector);
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
    *reinterpret_cast<Vector<bf16, kVector>*>(out + j * p.cols) = t == 0   ? terms[0]
                                                                  : t == 1 ? terms[1]
                                                                           : terms[2];
  }
}

bool is_multiple(const void* pointer, size_t bytes) {
  return reinterpret_cast<uintptr_t>(pointer) % bytes == 0;
}

template <int kVector>
void launch_split(Params params, int64_t values, void* stream) {
  params.vectors = values / kVector;
  launch({"split_bf16", stream, ceil_div<int64_t>(params.vectors, kThreads)}, split_kernel<kVector>,
         params);
}

}  // namespace

void split(const SplitArgs& args, void* stream) {
  const Params params{.x = args.x.data,
                      .out = args.out.data,
                      .terms = args.terms,
                      .vectors = 0,
                      .cols = args.x.dim(1)};
  constexpr int kWide = 4;
  const bool is_wide = params.cols % kWide == 0 && is_multiple(params.x, kWide * sizeof(float)) &&
                       is_multiple(params.out, kWide * sizeof(bf16));
  const auto run = is_wide ? launch_split<kWide> : launch_split<1>;
  run(params, numel(args.x.shape), stream);
}

}  // namespace moxie::cuda
