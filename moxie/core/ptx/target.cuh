// Which GPU has which features. Kernels choose at compile time, by these constants; a library for
// several GPUs holds a version of each kernel for every one. Host code asks the current GPU.
// MOXIE_CUDA_PLAIN restricts kernels to the features of sm_80, so that a newer GPU can test the
// code for sm_80.
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
inline constexpr int kArch = 0;  // host compilation
#endif

inline constexpr bool kHasMaxMagnitude = kArch >= 860;  // magnitude.cuh
inline constexpr bool kHasE4m3 = kArch >= 890;          // e4m3_convert.cuh
inline constexpr bool kHasTma = kArch >= 900;           // tma.cuh and mbarrier.cuh

// Shared memory of a CTA on every GPU from sm_80 on; sm_86, sm_89 and sm_120 have the least.
inline constexpr int kLeastShared = 99 << 10;

// Shared memory of a CTA on the current GPU.
inline int shared_here(std::string_view op) {
  if (kPlain) return kLeastShared;
  int device = 0, bytes = 0;
  MOXIE_CUDA_CHECK(op, cudaGetDevice(&device));
  MOXIE_CUDA_CHECK(op,
                   cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
  return bytes;
}

// Whether the version of this kernel that the current GPU runs uses TMA. The GPU's compute
// capability does not tell, because the GPU may run a version that was compiled for an older one.
template <class Params>
bool has_tma(std::string_view op, void (*kernel)(Params)) {
  if (kPlain) return false;
  // The answer is cached, because the query takes longer than a launch.
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
