#include "moxie/core/base/exec.h"

namespace moxie {

Isa best_isa() {
#if defined(__x86_64__)
  static const Isa kBest = [] {
    // simd/foreach_isa.h compiles the kAvx512 code for all four extensions.
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
      return Isa::kAvx512;
    if (__builtin_cpu_supports("avx2")) return Isa::kAvx2;
    return Isa::kBaseline;
  }();
  return kBest;
#else
  return Isa::kBaseline;
#endif
}

}  // namespace moxie
