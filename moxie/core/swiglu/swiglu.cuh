// SwiGLU on eight elements in registers. swiglu and the ops fused with it share this code, so that
// they give the same bytes.
#pragma once

#include "moxie/core/ptx/approximate.cuh"
#include "moxie/core/swiglu/activation.h"
#include "moxie/core/tile/fragment.cuh"

namespace moxie::cuda {

// Eight elements of T as words.
template <class T>
using RowWords = uint32_t[kFragment * sizeof(T) / 4];

// 1 / (1 + e^-z). bf16 uses approximate instructions, which flush subnormal results to zero. So it
// takes the reciprocal of a quarter of 1 + e^-z, which is a normal number wherever e^-z is finite.
template <class T>
__device__ float sigmoid(float z) {
  if constexpr (sizeof(T) == 4) {
    return 1.f / (1.f + expf(-z));
  } else {
    const float quarter = ptx::exp2_approximate(__fmaf_rn(z, -1.44269504f, -2.f));
    return 0.25f * ptx::reciprocal_approximate(0.25f + quarter);
  }
}

// Cuts off values beyond the limit. NaN fails every comparison, so it stays.
__device__ inline float clamp_gate(float gate) { return gate > kClampLimit ? kClampLimit : gate; }
__device__ inline float clamp_up(float up) {
  up = up > kClampLimit ? kClampLimit : up;
  return up < -kClampLimit ? -kClampLimit : up;
}

// Rounds every product, as a CPU does: no fused multiply-add.
template <class Glu>
__device__ float swiglu_of(float gate, float up) {
  using T = ElementOf<Glu>;
  if constexpr (Glu::kActivation == Activation::kSwiglu) {
    return __fmul_rn(__fmul_rn(gate, sigmoid<T>(gate)), up);
  } else {
    const float g = clamp_gate(gate);
    return __fmul_rn(__fmul_rn(g, sigmoid<T>(__fmul_rn(kClampAlpha, g))),
                     __fadd_rn(clamp_up(up), 1.f));
  }
}

struct SwigluGrads {
  float gate, up;
};
template <class Glu>
__device__ SwigluGrads swiglu_grads(float da, float gate, float up) {
  using T = ElementOf<Glu>;
  if constexpr (Glu::kActivation == Activation::kSwiglu) {
    const float s = sigmoid<T>(gate), silu = __fmul_rn(gate, s);
    const float slope = __fadd_rn(s, __fmul_rn(silu, __fsub_rn(1.f, s)));
    return {__fmul_rn(__fmul_rn(da, up), slope), __fmul_rn(da, silu)};
  } else {
    const float g = clamp_gate(gate), u = clamp_up(up);
    const float s = sigmoid<T>(__fmul_rn(kClampAlpha, g)), glu = __fmul_rn(g, s);
    const float slope = __fadd_rn(s, __fmul_rn(__fmul_rn(kClampAlpha, glu), __fsub_rn(1.f, s)));
    const float dgate = __fmul_rn(__fmul_rn(da, __fadd_rn(u, 1.f)), slope);
    const float dup = __fmul_rn(da, glu);
    return {gate > kClampLimit ? 0.f : dgate, up > kClampLimit || up < -kClampLimit ? 0.f : dup};
  }
}

template <class Glu, class T = ElementOf<Glu>>
__device__ void swiglu_row(const RowWords<T>& gate, const RowWords<T>& up, RowWords<T>& a) {
  float g[kFragment], u[kFragment];
  to_floats(gate, g), to_floats(up, u);
#pragma unroll
  for (int j = 0; j < kFragment; ++j) g[j] = swiglu_of<Glu>(g[j], u[j]);
  to_words(g, a);
}

// swiglu_row() of a row that has a weight.
template <class Glu, class T = ElementOf<Glu>>
__device__ void swiglu_row(const RowWords<T>& gate, const RowWords<T>& up, float weight,
                           RowWords<T>& a) {
  float g[kFragment], u[kFragment];
  to_floats(gate, g), to_floats(up, u);
#pragma unroll
  for (int j = 0; j < kFragment; ++j) g[j] = __fmul_rn(weight, swiglu_of<Glu>(g[j], u[j]));
  to_words(g, a);
}

template <class Glu, class T = ElementOf<Glu>>
__device__ void swiglu_backward_row(const RowWords<T>& da, const RowWords<T>& gate,
                                    const RowWords<T>& up, RowWords<T>& dgate, RowWords<T>& dup) {
  float d[kFragment], g[kFragment], u[kFragment];
  to_floats(da, d), to_floats(gate, g), to_floats(up, u);
#pragma unroll
  for (int j = 0; j < kFragment; ++j) {
    const SwigluGrads grads = swiglu_grads<Glu>(d[j], g[j], u[j]);
    g[j] = grads.gate, u[j] = grads.up;
  }
  to_words(g, dgate), to_words(u, dup);
}

template <class Glu, class T = ElementOf<Glu>>
__device__ void swiglu_backward_row(const RowWords<T>& da, const RowWords<T>& gate,
                                    const RowWords<T>& up, float weight, RowWords<T>& dgate,
                                    RowWords<T>& dup) {
  float d[kFragment], g[kFragment], u[kFragment];
  to_floats(da, d), to_floats(gate, g), to_floats(up, u);
#pragma unroll
  for (int j = 0; j < kFragment; ++j) {
    const SwigluGrads grads = swiglu_grads<Glu>(d[j], g[j], u[j]);
    g[j] = __fmul_rn(weight, grads.gate), u[j] = __fmul_rn(weight, grads.up);
  }
  to_words(g, dgate), to_words(u, dup);
}

}  // namespace moxie::cuda
