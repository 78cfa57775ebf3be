// Zeroes a range of bytes that no group covers; the CTAs of the tail share the work.
#pragma once

#include "moxie/core/base/cuda.cuh"

namespace moxie::cuda {

// Zeroes share `index` of `count` equal shares of a range of bytes.
__device__ inline void zero_share(void* data, int64_t bytes, int64_t index, int64_t count) {
  if (bytes <= 0) return;
  constexpr int64_t kWide = sizeof(uint4);
  const int64_t share = round_up(ceil_div(bytes, count), kWide);
  auto* const begin = static_cast<uint8_t*>(data) + index * share;
  const int64_t left = min(share, bytes - index * share);
  const bool aligned = reinterpret_cast<uintptr_t>(data) % kWide == 0;
  const int64_t wide = aligned ? max<int64_t>(left, 0) / kWide : 0;
#pragma unroll 1
  for (int64_t i = threadIdx.x; i < wide; i += kThreads)
    reinterpret_cast<uint4*>(begin)[i] = uint4{};
#pragma unroll 1
  for (int64_t i = wide * kWide + threadIdx.x; i < left; i += kThreads) begin[i] = 0;
}

}  // namespace moxie::cuda
