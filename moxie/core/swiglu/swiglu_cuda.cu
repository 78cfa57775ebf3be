#include "moxie/core/swiglu/backends.h"
#include "moxie/core/swiglu/weight_gradient.cuh"
#include "moxie/core/swiglu/weights.cuh"
#include "moxie/core/tile/source.cuh"

namespace moxie::cuda {
namespace {

template <class T>
struct SwigluParams {
  const T* da;  // backward
  const T* h;
  T* out;  // a, or dh
  int64_t width;
  int64_t chunks;  // of eight elements, in a row of a
  int64_t count;   // of chunks
  WeightParams of;
};

// A thread has several chunks, kThreads apart, so that their loads are in flight together.
template <bool kBackward, class T>
constexpr int kMyChunks = (kBackward ? 2 : 4) * 2 / static_cast<int>(sizeof(T));

struct ChunkAt {
  int64_t row;
  int col;

  // Divides in 32 bits if possible, because a 64-bit division takes longer than all else here.
  template <class T>
  __device__ ChunkAt(const SwigluParams<T>& p, int64_t chunk) {
    if (p.count <= 0xffffffff) {
      const auto index = static_cast<uint32_t>(chunk), chunks = static_cast<uint32_t>(p.chunks);
      row = index / chunks, col = static_cast<int>(index % chunks) * kFragment;
    } else {
      row = chunk / p.chunks, col = static_cast<int>(chunk % p.chunks) * kFragment;
    }
  }
};

template <class Glu, bool kAligned, bool kBackward>
__global__ __launch_bounds__(kThreads) void swiglu_kernel(
    const __grid_constant__ SwigluParams<ElementOf<Glu>> p) {
  using T = ElementOf<Glu>;
  constexpr int kMine = kMyChunks<kBackward, T>;
  const int64_t first = work_index() * kThreads * kMine + threadIdx.x;
  RowWords<T> da[kMine], gate[kMine], up[kMine];
#pragma unroll
  for (int i = 0; i < kMine; ++i) {
    const int64_t chunk = first + i * kThreads;
    const ChunkAt at(p, chunk);
    const int left = chunk < p.count ? static_cast<int>(p.width - at.col) : 0;
    const T* from = p.h + at.row * 2 * p.width + at.col;
    load_row<kAligned>(from, left, gate[i]);
    load_row<kAligned>(from + p.width, left, up[i]);
    if constexpr (kBackward) load_row<kAligned>(p.da + at.row * p.width + at.col, left, da[i]);
  }
#pragma unroll
  for (int i = 0; i < kMine; ++i) {
    const int64_t chunk = first + i * kThreads;
    const ChunkAt at(p, chunk);
    const int left = chunk < p.count ? static_cast<int>(p.width - at.col) : 0;
    if constexpr (kBackward) {
      T* const to = p.out + at.row * 2 * p.width + at.col;
      RowWords<T> dgate, dup;
      if (p.of.weights && left > 0)
        swiglu_backward_row<Glu>(da[i], gate[i], up[i], p.of.weight(at.row), dgate, dup);
      else
        swiglu_backward_row<Glu>(da[i], gate[i], up[i], dgate, dup);
      store_row<kAligned>(to, left, dgate);
      store_row<kAligned>(to + p.width, left, dup);
    } else {
      RowWords<T> a;
      if (p.of.weights && left > 0)
        swiglu_row<Glu>(gate[i], up[i], p.of.weight(at.row), a);
      else
        swiglu_row<Glu>(gate[i], up[i], a);
      store_row<kAligned>(p.out + at.row * p.width + at.col, left, a);
    }
  }
}

// The arguments of launch_swiglu() for both directions.
struct LaunchArgs {
  const char* op;
  ConstFloatView h;
  const void* da;  // backward
  void* out;
  WeightParams of;
  Activation activation;
};

template <bool kBackward>
void launch_swiglu(const LaunchArgs& args, void* stream) {
  const auto& [op, h, da, out, of, activation] = args;
  const int64_t width = h.dim(1) / 2, chunks = ceil_div<int64_t>(width, kFragment);
  with_glu(h.format, activation, [&]<class Glu>() {
    using T = ElementOf<Glu>;
    const SwigluParams<T> params{.da = static_cast<const T*>(da),
                                 .h = static_cast<const T*>(h.data),
                                 .out = static_cast<T*>(out),
                                 .width = width,
                                 .chunks = chunks,
                                 .count = h.dim(0) * chunks,
                                 .of = of};
    const bool aligned = are_rows_aligned(params.h, width, kFragment) &&
                         are_rows_aligned(params.out, width, kFragment) &&
                         are_rows_aligned(params.da, width, kFragment);
    const int64_t per_cta = kThreads * kMyChunks<kBackward, T>;
    with_alignment(aligned, [&]<bool kAligned>() {
      launch({op, stream, ceil_div(params.count, per_cta)}, swiglu_kernel<Glu, kAligned, kBackward>,
             params);
    });
  });
}

}  // namespace

void swiglu(const SwigluArgs& args, void* stream) {
  launch_swiglu<false>(
      {"swiglu", args.h, nullptr, args.a.data, weight_params(args.weights), args.activation},
      stream);
}

void swiglu_backward(const SwigluBackwardArgs& args, void* stream) {
  constexpr const char* kOp = "swiglu_backward";
  launch_swiglu<true>(
      {kOp, args.h, args.da.data, args.dh.data, weight_params(args.weights), args.activation},
      stream);
  if (args.weights) weight_gradient(kOp, {*args.weights, args.da, args.h, args.activation}, stream);
}

}  // namespace moxie::cuda
