// The shape of a thread block, and where a thread is in it. Needs no header of the toolkit, so that
// tests run on a CPU what is written with it (tests/support/cta_on_host.h).
#pragma once

#include <cstdint>

namespace moxie::cuda {

inline constexpr int kWarp = 32;
inline constexpr int kWarps = 8;
inline constexpr int kThreads = kWarp * kWarps;  // of a CTA, unless Launch says otherwise

// Unsigned until the end: the remainder of a signed number takes four instructions.
__device__ inline int lane_index() { return static_cast<int>(threadIdx.x % unsigned{kWarp}); }
__device__ inline int warp_index() { return static_cast<int>(threadIdx.x / unsigned{kWarp}); }

}  // namespace moxie::cuda
