// The shape of a CTA, and a thread's place in it. Includes no CUDA headers, so that tests can run
// code that uses it on a CPU (tests/support/cta_on_host.h).
#pragma once

#include <cstdint>

namespace moxie::cuda {

inline constexpr int kWarp = 32;
inline constexpr int kWarps = 8;
inline constexpr int kThreads = kWarp * kWarps;  // threads of a CTA; Launch::threads overrides it

// Divides unsigned numbers, because the remainder of a signed number takes four instructions.
__device__ inline int lane_index() { return static_cast<int>(threadIdx.x % unsigned{kWarp}); }
__device__ inline int warp_index() { return static_cast<int>(threadIdx.x / unsigned{kWarp}); }

}  // namespace moxie::cuda
