// Instructions of the special-function unit, with an error of one or two ulp of f32. Subnormal
// arguments and results are flushed to 0.
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
