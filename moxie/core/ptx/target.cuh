// What GPUs have. Kernels choose by constants while they are compiled, and a library for several
// GPUs holds a version of each kernel for every one; the host asks the GPU at hand.
// MOXIE_CUDA_PLAIN takes only what every GPU from sm_80 on has, so that a newer one can test that.
#pragma once

#include <cuda_runtime.h>

#include <string_view>

#include "moxie/core/base/cuda.cuh"

namespace moxie::ptx {

#if defined(MOXIE_CUDA_PLAIN)
inline constexpr bool kPlain = true;
#else
inline constexpr bool kPlain = false;
#endif
#if defined(__CUDA_ARCH__)
inline constexpr int kArch = kPlain ? 800 : __CUDA_ARCH__;
#else
inline constexpr int kArch = 0;  // the host's part, which has no kernels
#endif

inline constexpr bool kHasMaxMagnitude = kArch >= 860;  // magnitude.cuh
inline constexpr bool kHasE4m3 = kArch >= 890;          // e4m3_convert.cuh
inline constexpr bool kHasTma = kArch >= 900;           // tma.cuh and mbarrier.cuh

// Shared memory that a CTA can have on every GPU from sm_80 on; sm_86, sm_89 and sm_120 have least.
inline constexpr int kLeastShared = 99 << 10;

// And on the GPU at hand.
inline int shared_here(std::string_view op) {
  if (kPlain) return kLeastShared;
  int device = 0, bytes = 0;
  MOXIE_CUDA_CHECK(op, cudaGetDevice(&device));
  MOXIE_CUDA_CHECK(op,
                   cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
  return bytes;
}

// Does the version of this kernel that the GPU at hand runs have TMA? The GPU's own capability is
// no answer, as it may run code that was made for an older one.
template <class Params>
bool has_tma(std::string_view op, void (*kernel)(Params)) {
  if (kPlain) return false;
  // The last answer is kept: CUDA takes longer for it than for a launch.
  thread_local int known_device = -1;
  thread_local bool known = false;
  int device = 0;
  MOXIE_CUDA_CHECK(op, cudaGetDevice(&device));
  if (device != known_device) {
    cudaFuncAttributes attributes{};
    MOXIE_CUDA_CHECK(op, cudaFuncGetAttributes(&attributes, kernel));
    known = attributes.ptxVersion >= 90;
    known_device = device;
  }
  return known;
}

}  // namespace moxie::ptx
