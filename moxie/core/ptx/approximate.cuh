// The special-function unit: one instruction each, with an error of an ulp or two of f32. Subnormal
// arguments and results are 0.
#pragma once

namespace moxie::ptx {

__device__ inline float exp2_approximate(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ inline float reciprocal_approximate(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace moxie::ptx
