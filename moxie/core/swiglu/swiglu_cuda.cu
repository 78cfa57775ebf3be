#include <cuda_bf16.h>

#include "moxie/core/base/cuda.cuh"
#include "moxie/core/swiglu/backends.h"

namespace moxie::cuda {
namespace {

template <class T>
struct SwigluParams {
  const T* da;  // backward
  const T* h;
  T* out;  // a, or dh
  int64_t width, count;
};

__device__ float sigmoid(float z) { return 1.f / (1.f + expf(-z)); }

__device__ void put(float* to, float value) { *to = value; }
__device__ void put(__nv_bfloat16* to, float value) { *to = __float2bfloat16(value); }

template <class T>
__global__ __launch_bounds__(kThreads) void swiglu_kernel(
    const __grid_constant__ SwigluParams<T> p) {
  const int64_t i = work_index() * kThreads + threadIdx.x;
  if (i >= p.count) return;
  const int64_t gate_at = i / p.width * 2 * p.width + i % p.width;
  const auto gate = static_cast<float>(p.h[gate_at]);
  const auto up = static_cast<float>(p.h[gate_at + p.width]);
  // No fused multiply-add here: every product is rounded, as on a CPU.
  put(p.out + i, __fmul_rn(__fmul_rn(gate, sigmoid(gate)), up));
}

template <class T>
__global__ __launch_bounds__(kThreads) void swiglu_backward_kernel(
    const __grid_constant__ SwigluParams<T> p) {
  const int64_t i = work_index() * kThreads + threadIdx.x;
  if (i >= p.count) return;
  const int64_t gate_at = i / p.width * 2 * p.width + i % p.width;
  const auto gate = static_cast<float>(p.h[gate_at]);
  const auto up = static_cast<float>(p.h[gate_at + p.width]);
  const auto da = static_cast<float>(p.da[i]);
  const float s = sigmoid(gate), silu = __fmul_rn(gate, s);
  const float slope = __fadd_rn(s, __fmul_rn(silu, __fsub_rn(1.f, s)));
  put(p.out + gate_at, __fmul_rn(__fmul_rn(da, up), slope));
  put(p.out + gate_at + p.width, __fmul_rn(da, silu));
}

template <class T>
SwigluParams<T> params_of(const void* da, const ConstFloatView& h, void* out) {
  return {.da = static_cast<const T*>(da),
          .h = static_cast<const T*>(h.data),
          .out = static_cast<T*>(out),
          .width = h.dim(1) / 2,
          .count = h.dim(0) * (h.dim(1) / 2)};
}

template <class T>
void launch_elements(const char* op, void* stream, void (*kernel)(SwigluParams<T>),
                     const SwigluParams<T>& params) {
  launch({op, stream, ceil_div<int64_t>(params.count, kThreads)}, kernel, params);
}

}  // namespace

void swiglu(const SwigluArgs& args, void* stream) {
  if (args.h.format == Format::kF32)
    launch_elements("swiglu", stream, swiglu_kernel<float>,
                    params_of<float>(nullptr, args.h, args.a.data));
  else
    launch_elements("swiglu", stream, swiglu_kernel<__nv_bfloat16>,
                    params_of<__nv_bfloat16>(nullptr, args.h, args.a.data));
}

void swiglu_backward(const SwigluBackwardArgs& args, void* stream) {
  if (args.h.format == Format::kF32)
    launch_elements("swiglu_backward", stream, swiglu_backward_kernel<float>,
                    params_of<float>(args.da.data, args.h, args.dh.data));
  else
    launch_elements("swiglu_backward", stream, swiglu_backward_kernel<__nv_bfloat16>,
                    params_of<__nv_bfloat16>(args.da.data, args.h, args.dh.data));
}

}  // namespace moxie::cuda
